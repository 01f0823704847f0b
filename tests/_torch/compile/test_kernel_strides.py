"""Fake tensors' strides beside those of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from partita._torch.compile.kernel_strides import strides_of_kernels

_aten = torch.ops.aten
SHAPE = (2, 3, 4, 5)


def normalised(x: Tensor) -> Any:
    return _aten._native_batch_norm_legit_functional(
        x, None, None, x[0, :, 0, 0] * 0, x[0, :, 0, 0], True, 0.1, 1e-5
    )


def of_normalised(x: Tensor) -> Any:
    gradient = x.new_ones(x.shape)
    statistics = x[0, :, 0, 0] + 1
    return _aten.native_batch_norm_backward(
        gradient, x, statistics, None, None, statistics, statistics, True, 1e-5, [True, True, True]
    )


def of_layer(x: Tensor) -> Any:
    statistics, weight = x.new_ones(*SHAPE[:3], 1), x.new_ones(SHAPE[3])
    return _aten.native_layer_norm_backward(
        x, x.new_ones(x.shape), [SHAPE[3]], statistics, statistics, weight, weight, [True, True, True]
    )


def of_whole(x: Tensor) -> Any:
    statistics, weight = x.new_ones(1, 1, 1, 1), x.new_ones(x.shape)
    return _aten.native_layer_norm_backward(
        x, weight, [*SHAPE], statistics, statistics, weight, weight, [True, True, True]
    )


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "batch norm": normalised,
    "batch norm's gradient": of_normalised,
    "layer norm's gradient": of_layer,
    "of all dimensions": of_whole,
    "log softmax's gradient": lambda x: _aten._log_softmax_backward_data(x, x.new_ones(x.shape), 1, x.dtype),
    "mse's gradient": lambda x: _aten.mse_loss_backward(x[0, 0, 0, 0], x, x.new_ones(x.shape), 1),
    "huber's gradient": lambda x: _aten.huber_loss_backward(x[0, 0, 0, 0], x, x.new_ones(x.shape), 1, 1.0),
    "smooth l1's": lambda x: _aten.smooth_l1_loss_backward(x[0, 0, 0, 0], x, x.new_ones(x.shape), 1, 1.0),
    "log sigmoid": lambda x: _aten.log_sigmoid_forward(x)[0],
    "nll": lambda x: _aten.nll_loss2d_forward(x, (x[:, 0] * 0).long(), None, 0, -100)[0],
}


def strides(results: Any) -> list[tuple[int, ...]]:
    several = results if isinstance(results, tuple) else (results,)
    return [one.stride() for one in several if isinstance(one, Tensor)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fake_tensors_lie_as_the_kernels_results(name: str) -> None:
    function = FUNCTIONS[name]
    plain = []
    for order in permutations(range(4)):
        back = [order.index(dim) for dim in range(4)]
        x = torch.randn([SHAPE[dim] for dim in order]).permute(back)
        assert x.shape == SHAPE
        real = strides(function(x))
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            plain.append(strides(function(fake)) == real)
            with strides_of_kernels():
                assert strides(function(fake)) == real
            plain.append(strides(function(fake)) == real)
    assert not all(plain)  # else torch has mended this rule, and it can go
    assert plain[::2] == plain[1::2]


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "softplus": lambda dy, x: _aten.softplus_backward(dy, x, 1.0, 20.0),
    "elu": lambda dy, x: _aten.elu_backward(dy, 1.0, 1.0, 1.0, False, x),
    "hardswish": _aten.hardswish_backward,
    "hardsigmoid": _aten.hardsigmoid_backward,
    "hardtanh": lambda dy, x: _aten.hardtanh_backward(dy, x, -1.0, 1.0),
    "logit": _aten.logit_backward,
    "dropout": lambda dy, x: _aten.native_dropout_backward(dy, x > 0, 2.0),
    "cross entropy of two": lambda dy, x: _aten.binary_cross_entropy_backward(dy, x, x.new_ones(x.shape)),
    "floor division": torch.floor_divide,
}
NOT_BROADCAST = ("cross entropy of two",)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operands_in_different_orders_give_the_kernels_order(name: str) -> None:
    """The gradient of softplus of a transposed activation: it arrives in plain order, or otherwise."""
    function = ELEMENTWISE[name]
    plain = []
    for orders in product(((0, 1, 2), (0, 2, 1), (2, 1, 0)), repeat=2):
        dy, x = (torch.rand([SHAPE[dim] for dim in order]).permute(order) for order in orders)
        assert dy.shape == x.shape == SHAPE[:3]  # each of these orders is its own inverse
        for operands in ((dy, x), (dy[:, :1], x), (dy, x[..., :1])):
            if name in NOT_BROADCAST and operands[0].shape != operands[1].shape:
                continue
            real = strides(function(*operands))
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(operand) for operand in operands]
                plain.append(strides(function(*fakes)) == real)
                with strides_of_kernels():
                    assert strides(function(*fakes)) == real, (orders, [each.shape for each in operands])
    assert not all(plain)  # else torch has mended this rule, and it can go


def test_sizes_that_are_symbols_are_laid_out_too() -> None:
    def transposed(x: Tensor) -> Any:
        return normalised(x.permute(0, 2, 3, 1))[0]

    x = torch.randn(2, 4, 5, 3).transpose(1, 2)
    with strides_of_kernels():
        graph = make_fx(transposed, tracing_mode="symbolic")(x)
    (norm,) = (node for node in graph.graph.nodes if "batch_norm" in str(node.target))
    result = next(iter(norm.users)).meta["val"]
    real = transposed(x)
    assert result.is_contiguous() == real.is_contiguous()
    assert result.is_contiguous(memory_format=torch.channels_last) == real.is_contiguous(
        memory_format=torch.channels_last
    )
