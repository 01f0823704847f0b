"""A graph with open sizes, made to look like one without: its metadata has the example's sizes, and what is
open stands beside it (`Sizes`).

So whoever reads graphs (the planner, the splitter, the check of writes) meets plain numbers. Before that is
believed, the graph is run without computing anything (fake tensors) for the example and for sizes of 1, where
rules of broadcasting and squeezing may take another way, and every shape is compared with what was promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.export.open_sizes import SIZE_OF, OpenSizes, drop_size_asserts, open_sizes
from partita._torch.fake.shapes import fake_values
from partita.capture.sizes import Condition, Size, Sizes, Symbol, evaluated, sizes_of
from partita.errors import CaptureError

__all__ = ["specialise_sizes"]


def specialise_sizes(gm: GraphModule, flat: Sequence[Any], *, provable: bool = False) -> Sizes:
    """Write the example's sizes into a graph's metadata, in place, where some are open.

    Args:
        flat: the example's inputs, one a placeholder.
        provable: whether the graph will be compared with the model. Then a batch of one passes conditions
            that it does not meet (``if len(x) != 1: mask = mask.expand(...)`` changes nothing there), and it
            has to be seen that the graph is the model for that too; see `Condition.strict`.

    Raises:
        CaptureError: the graph does not hold for the example, or a size depends on data.
    """
    found = open_sizes(gm)
    if found is None:
        return Sizes()
    if not found.symbols:
        return Sizes(fixed=found.closed)
    drop_size_asserts(gm)
    _read_sizes_first(gm)
    sizes = _plain(found, {node.name for node in gm.graph.nodes})
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    given = sizes_of(sizes.symbols, names, flat)
    for condition in sizes.conditions:
        if any(condition.text == f"{name} == {size}" for name, size in given.items()):
            raise CaptureError(condition.where)
    if provable:
        sizes = _with_one(sizes)
    for condition in sizes.conditions:
        if not condition.holds(given):
            raise CaptureError(f"the example does not meet {condition.text}: {condition.where}")
    shapes = _promised(gm, sizes)
    values = _checked(gm, shapes, given, flat)
    for node in gm.graph.nodes:
        if "val" in node.meta and node.name in values:
            node.meta["val"] = values[node.name]
    return _checked_at_one(gm, sizes, shapes, given, flat)


def _read_sizes_first(gm: GraphModule) -> None:
    """Read each tensor's size right after it is made: who needs the size then needs not wait for the
    tensor.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not SIZE_OF:
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        (inputs[-1] if source.op == "placeholder" else source).append(node)
        node.meta["nn_module_stack"] = source.meta.get(
            "nn_module_stack", {}
        )  # it is no part of its reader any more
    gm.graph.lint()


def _plain(found: OpenSizes, present: set[str]) -> Sizes:
    return Sizes(
        symbols=tuple(Symbol(*symbol) for symbol in found.symbols),
        shapes={
            name: tuple(Size(size) if isinstance(size, str) else size for size in shape)
            for name, shape in found.shapes.items()
            if name in present
        },
        numbers={name: Size(text) for name, text in found.numbers.items() if name in present},
        conditions=tuple(Condition(*condition) for condition in found.conditions),
        fixed=found.closed,
    )


def _with_one(sizes: Sizes) -> Sizes:
    """With conditions that a batch of one meets too."""
    one = {symbol.name: 1 for symbol in sizes.symbols}
    if any(symbol.dim for symbol in sizes.symbols):
        return sizes
    is_one = " and ".join(f"{name} == 1" for name in one)
    return replace(
        sizes,
        conditions=tuple(
            condition
            if condition.holds(one)
            else replace(condition, text=f"{is_one} or ({condition.text})", strict=condition.text)
            for condition in sizes.conditions
        ),
    )


def _promised(gm: GraphModule, sizes: Sizes) -> dict[str, tuple[int | Size, ...]]:
    """The shape of every tensor."""
    found = {
        node.name: tuple(int(size) for size in value.shape)
        for node in gm.graph.nodes
        if node.name not in sizes.shapes and isinstance(value := node.meta.get("val"), Tensor)
    }
    return {**found, **sizes.shapes}


def _checked(
    gm: GraphModule, shapes: Mapping[str, tuple[int | Size, ...]], at: Mapping[str, int], flat: Sequence[Any]
) -> dict[str, Any]:
    """The values of all nodes, without history.

    Raises:
        CaptureError: one has another shape than the graph promises.
    """
    values = fake_values(gm, flat, grad=False)
    for name, value in values.items():
        if isinstance(value, Tensor) and name in shapes:
            expected = evaluated(shapes[name], at)
            if tuple(value.shape) != expected:
                raise CaptureError(f"{name!r} has shape {list(value.shape)} and not {list(expected)}")
    return values


def _checked_at_one(
    gm: GraphModule,
    sizes: Sizes,
    shapes: Mapping[str, tuple[int | Size, ...]],
    given: Mapping[str, int],
    flat: Sequence[Any],
) -> Sizes:
    """With a condition more where the graph does not hold for sizes of 1."""
    one = dict.fromkeys(given, 1)
    if one == given or not all(condition.holds(one) for condition in sizes.conditions):
        return sizes
    inputs = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    example = [
        value.detach().new_empty(evaluated(sizes.shapes[name], one)) if name in sizes.shapes else value
        for name, value in zip(inputs, flat, strict=True)
    ]
    try:
        _checked(gm, shapes, one, example)
    except Exception as error:  # whatever an operator says to such a shape
        where = (str(error).splitlines() or [type(error).__name__])[0]
        return replace(
            sizes, conditions=(*sizes.conditions, *(Condition(f"{name} > 1", where) for name in given))
        )
    return sizes
