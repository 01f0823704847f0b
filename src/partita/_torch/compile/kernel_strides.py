"""Results that fake tensors lay out in memory otherwise than the kernels of a CPU.

A graph is traced with fake tensors, and what torch composes of other operators is chosen by their strides: a
linear layer in three dimensions is one ``addmm`` where its input is in plain order, else a product and a sum,
which differ in last bits. For the operators named here, the rules of fake tensors keep the order of a
transposed input and the kernels do not::

    x [2, 8, 3], strides (24, 1, 8)  ── batch_norm ──>  kernel (24, 3, 1), fake (24, 1, 8)

Seen by comparing both over all of torch's own samples of operators with their dimensions in other orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

__all__ = ["strides_of_kernels"]

_aten = torch.ops.aten
_IN_PLAIN_ORDER = (
    _aten.native_layer_norm_backward.default,
    _aten._log_softmax_backward_data.default,
    _aten.mse_loss_backward.default,
    _aten.huber_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.log_sigmoid_forward.default,
    _aten.nll_loss2d_forward.default,
)
_AS_THE_INPUT_SUGGESTS = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten._native_batch_norm_legit_no_training.default: 0,
    _aten._batch_norm_with_update.default: 0,
    _aten._batch_norm_with_update_functional.default: 0,
    _aten._batch_norm_no_update.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.batch_norm_backward.default: 1,
}
"""In plain order or with channels last. The position of the argument that says which."""
_AS_THE_OPERANDS = {
    _aten.softplus_backward.default: slice(None),
    _aten.elu_backward.default: slice(None),
    _aten.hardswish_backward.default: slice(None),
    _aten.hardsigmoid_backward.default: slice(None),
    _aten.hardtanh_backward.default: slice(None),
    _aten.logit_backward.default: slice(None),
    _aten.native_dropout_backward.default: slice(None),
    _aten.floor_divide.default: slice(None),
    _aten.binary_cross_entropy_backward.default: slice(1, 2),
}
"""Elementwise: as the first operand lies, and where that leaves it open (one size, or expanded) as the next.
The rules of fake tensors compose them of other operators, ``torch.where`` for one, which take them in
another sequence. The arguments that count."""

_LOCK = threading.RLock()


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """In this block, fake tensors of a CPU have the strides that its kernels give.

    >>> with strides_of_kernels(), FakeTensorMode():
    ...     x = torch.ones(2, 3, 8).transpose(1, 2)
    ...     torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False).stride()
    (24, 3, 1)
    """
    table: dict[Any, Any] = decomposition_table
    ours = {op: _laid_out(table[op], None) for op in _IN_PLAIN_ORDER}
    ours |= {op: _laid_out(table[op], place) for op, place in _AS_THE_INPUT_SUGGESTS.items()}
    ours |= {op: _elementwise(table[op], which) for op, which in _AS_THE_OPERANDS.items()}
    with _LOCK:
        before = {op: table[op] for op in ours}
        table.update(ours)
        _forget_results()
        try:
            yield
        finally:
            table.update(before)
            _forget_results()


def _forget_results() -> None:
    """Fake tensors keep what operators have given: for all, and for the sizes of what is being compiled."""
    FakeTensorMode.cache_clear()
    mode = detect_fake_mode()
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.fake_tensor_cache.clear()


def _laid_out(rule: Callable[..., Any], place: int | None) -> Callable[..., Any]:
    """A rule of fake tensors whose results are laid out as the kernel's.

    Args:
        place: see ``_AS_THE_INPUT_SUGGESTS``; None: in plain order.
    """

    @wraps(rule)  # its name and module say that it is torch's
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        order = torch.contiguous_format if place is None else suggest_memory_format(args[place])
        return tree_map_only(Tensor, partial(_in_order, order=order), rule(*args, **kwargs))

    return laid_out


def _elementwise(rule: Callable[..., Any], which: slice) -> Callable[..., Any]:
    """The rule of an elementwise operator, whose result is laid out as its operands make the kernel.

    Args:
        which: see ``_AS_THE_OPERANDS``.
    """

    @wraps(rule)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        operands = [operand for operand in args[which] if isinstance(operand, Tensor)]
        if result.device.type != "cpu" or not operands:
            return result
        strides = compute_elementwise_output_strides(*(each.expand(result.shape) for each in operands))
        is_so = result.stride() == strides
        return result if is_so else result.new_empty_strided(result.shape, strides)

    return laid_out


def _in_order(result: Tensor, order: torch.memory_format) -> Tensor:
    if result.device.type != "cpu" or result.dim() < 2:  # statistics are vectors
        return result
    is_so = result.is_contiguous(memory_format=order)
    return result if is_so else torch.empty_like(result, memory_format=order)
