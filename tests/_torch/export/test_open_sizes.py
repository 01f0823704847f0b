from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita._torch.export.export import export_module
from partita._torch.export.open_sizes import (
    batch_is_open,
    constant_size,
    drop_size_asserts,
    forget_sizes,
    is_symbolic,
    open_batch,
    open_sizes,
)


class Plain(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).reshape(2 * x.shape[0], -1)


class Branch(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return x
        return x.sin() if x.shape[0] < 100 else y


class Pairs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(x.shape[0] // 2, 2, 4)


class Fixed(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[0] == 4
        return x + 1


class Data(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[x > 0]


def _exported(model: nn.Module, rows: int = 4, *, strict: bool = False) -> torch.fx.GraphModule:
    x, y = torch.ones(rows, 4), torch.ones(rows, 4)
    return export_module(
        model, (x, y), {}, way="strict" if strict else "eager", dynamic_shapes=open_batch([x, y])
    )


@pytest.mark.parametrize("strict", [False, True])
def test_shapes_and_numbers_are_expressions_over_names(strict: bool) -> None:
    sizes = open_sizes(_exported(Plain(), strict=strict))
    assert sizes is not None
    assert sizes.symbols == (("batch", "x", 0),)
    assert sizes.shapes["reshape"] == ("2*batch", 2)
    assert "2*batch" in sizes.numbers.values()
    assert sizes.conditions == ()


def test_sizes_that_nothing_ties_together_have_names_of_their_own() -> None:
    sizes = open_sizes(_exported(Branch()))
    assert sizes is not None
    assert sizes.symbols == (("x_0", "x", 0), ("y_0", "y", 0))


@pytest.mark.parametrize("strict", [False, True])
def test_every_branch_becomes_a_condition_with_its_line(strict: bool) -> None:
    sizes = open_sizes(_exported(Branch(), strict=strict))
    assert sizes is not None
    lines = dict(sizes.conditions)
    assert "if x.shape[0] == 1:" in lines["x_0 != 1"]
    assert "test_open_sizes.py" in lines["x_0 != 1"]
    assert any("x_0 <= 99" in text or "x_0 < 100" in text for text in lines)


def test_a_size_that_must_be_even_says_so() -> None:
    sizes = open_sizes(_exported(Pairs()))
    assert sizes is not None
    ((text, _),) = sizes.conditions
    holds = {size: eval(text, {"x_0": size, "batch": size}) for size in (2, 3, 4)}
    assert holds == {2: True, 3: False, 4: True}


def test_a_size_that_the_model_fixes_is_a_number_and_the_line_is_known() -> None:
    sizes = open_sizes(_exported(Fixed()))
    assert sizes is not None
    assert [symbol[1] for symbol in sizes.symbols] == ["y"]
    assert "assert x.shape[0] == 4" in sizes.closed


def test_sizes_that_depend_on_data_are_not_known() -> None:
    assert open_sizes(_exported(Data())) is None


def test_checks_of_sizes_leave_a_graph() -> None:
    module = _exported(Pairs())
    drop_size_asserts(module)
    assert "assert" not in module.code
    x = torch.randn(6, 4)
    assert module(x, x).shape == (3, 2, 4)
    assert not is_symbolic(3)


def test_torch_is_as_before_afterwards() -> None:
    before = ShapeEnv._get_sloc, torch.fx.experimental._config.backed_size_oblivious
    with pytest.raises(ZeroDivisionError), batch_is_open():
        raise ZeroDivisionError
    assert (ShapeEnv._get_sloc, torch.fx.experimental._config.backed_size_oblivious) == before


def _environments() -> int:
    gc.collect()
    return sum(type(one) is ShapeEnv for one in gc.get_objects())


def test_traces_with_open_sizes_are_let_go_of() -> None:
    """Each left its environment for ever: sizes refer to it from within C++, and torch's caches hold it."""
    _exported(Pairs())
    forget_sizes()
    before = _environments()  # torch itself keeps the last graph
    for _ in range(2):
        _exported(Pairs())
    forget_sizes()
    assert _environments() <= before


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("(48*batch) // batch", 48),
        ("batch - batch + 2", 2),
        ("(3*batch + 1) // batch", None),
        ("batch * 2 // other", None),
        ("min(2, 3)", None),
    ],
)
def test_a_constant_is_told_from_a_size(text: str, number: int | None) -> None:
    assert constant_size(text) == number
