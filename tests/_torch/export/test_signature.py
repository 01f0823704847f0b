"""How arguments of an exported module are bound, flattened and rebuilt."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partita._torch.export.export import export_module
from partita._torch.export.signature import Signature, all_arguments, signature_of
from partita.errors import ArgumentError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(
        self, x: Tensor, pair: tuple[Tensor, int], *, shift: Tensor, scale: float = 2.0
    ) -> dict[str, Any]:
        return {"out": self.layer(x) * self.hidden + torch.tensor([1.0, 2.0]) + pair[0] + shift, "none": None}


def _unlifted() -> tuple[Model, Any, Signature]:
    model, x = Model(), torch.randn(3, 2)
    module = export_module(model, (x, (x, 3)), {"shift": x}, way="eager")
    return model, module, signature_of(module, model.forward)


def test_a_signature_flattens_arguments_and_builds_results() -> None:
    model, module, signature = _unlifted()
    x = torch.randn(3, 2)
    assert [type(value) for value in signature.flatten((x, (x, 3)), {"shift": x})] == [
        Tensor,
        Tensor,
        int,
        Tensor,
    ]
    output = module(x, (x, 3), shift=x)
    assert torch.equal(output["out"], model(x, (x, 3), shift=x)["out"])
    assert signature.unflatten([1, None]) == {"out": 1, "none": None}


def test_values_of_placeholders_stand_by_parameter_where_each_has_a_name() -> None:
    _, _, signature = _unlifted()
    assert signature.by_parameter(range(4)) == {"x": 0, "pair": (1, 2), "shift": 3}
    assert Signature(signature.in_spec, signature.out_spec, ["x"]).by_parameter(range(4)) is None
    ordered = pytree.tree_structure(((OrderedDict(x=0),), {}))
    assert Signature(ordered, signature.out_spec, ["x"]).by_parameter([0]) is None


def test_arguments_may_be_given_by_name_or_position() -> None:
    _, _, signature = _unlifted()
    expected = (("x", "pair"), {"shift": "s"})
    assert signature.bind(("x", "pair"), {"shift": "s"}) == expected
    assert signature.bind((), {"shift": "s", "pair": "pair", "x": "x"}) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            ("x",),
            {"shift": 0},
            "arguments missing: pair. The model was captured with x, pair, shift: give exactly",
        ),
        (
            ({"pair": 1, "shift": 0},),
            {},
            "missing: pair, shift.*x is a dict that has them, so give its items",
        ),
        (("x", "p"), {"shift": 0, "scale": 1.0}, "arguments not there at capture: scale"),
        (("x", "p"), {"shift": 0, "pair": 1}, "arguments given twice: pair"),
        (("x", "p", "q"), {"shift": 0}, "the model takes 2 positional arguments, got 3"),
    ],
)
def test_other_arguments_are_refused_by_name(args: Any, kwargs: Any, text: str) -> None:
    _, _, signature = _unlifted()
    with pytest.raises(ValueError, match=text):
        signature.bind(args, kwargs)


def test_arguments_of_another_structure_are_refused() -> None:
    _, _, signature = _unlifted()
    with pytest.raises(ValueError, match="but the model was captured with"):
        signature.flatten((1, [1, 2]), {"shift": 1})


def test_a_signature_is_pickled_and_copied() -> None:
    _, _, signature = _unlifted()
    assert copy.deepcopy(signature) is signature
    other = pickle.loads(pickle.dumps(signature))
    assert other.flatten((1, (2, 3)), {"shift": 4}) == [1, 2, 3, 4]
    assert other.unflatten([1, None]) == {"out": 1, "none": None}


def test_defaults_are_filled_in_for_operators_only() -> None:
    assert all_arguments(torch.ops.aten.roll.default, ("x", [1])) == ("x", [1], [])
    assert all_arguments(torch.ops.aten.roll.default, ("x",)) == ("x",)  # one without a default is missing
    assert all_arguments(max, [1]) == (1,)


class _TakesAny(nn.Linear):
    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(args[0]) + args[1]


def test_arguments_without_names_are_counted_and_open_sizes_stand_by_the_name_of_all() -> None:
    """Names ended in torch's ValueError, other sizes without the `dynamic_shapes` to give."""
    model, x = _TakesAny(2, 2), torch.randn(3, 2)
    signature = signature_of(export_module(model, (x, x), {}, way="eager"), model.forward)
    assert signature.by_parameter([0, 1]) == {"args": (0, 1)}
    assert signature.flatten((1, 2), {}) == [1, 2]
    for args, kwargs in (((x,), {}), ((x, x, x), {}), ((), {"x": x, "y": x}), ((x, x), {"y": x})):
        with pytest.raises(
            ArgumentError, match=r"captured with 2 by position and none by name: .* \*args has no"
        ):
            signature.flatten(args, kwargs)
