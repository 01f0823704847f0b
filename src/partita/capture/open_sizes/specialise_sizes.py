"""Replacing the symbolic sizes in a graph's metadata by the example's; the open ones are kept in `Sizes`.

So whatever reads graphs (the planner, the splitter, the check of writes) finds integers. To be sure of the
open shapes, the graph is run on fake tensors for the example and for sizes of 1, for which broadcasting and
squeezing have rules of their own, and every shape is compared with the one in `Sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.export.open_sizes import SIZE_OF, OpenSizes, drop_size_asserts, open_sizes
from partita._torch.fake.shapes import fake_values
from partita.capture.open_sizes.sizes import Condition, Size, Sizes, Symbol, evaluated, sizes_of
from partita.errors import CaptureError

__all__ = ["specialise_sizes"]


def specialise_sizes(gm: GraphModule, flat: Sequence[Any], *, provable: bool = False) -> Sizes:
    """Write the example's sizes into a graph's metadata, in place, where some are open.

    Args:
        flat: the example's inputs, one for each placeholder.
        provable: whether the graph will be compared with the model. Then a batch of one is admitted even
            where a condition excludes it (``if len(x) != 1: mask = mask.expand(...)`` changes nothing there),
            and has to be proven too; see `Condition.strict`.

    Raises:
        CaptureError: the graph is not for the example's sizes, or a size depends on data.
    """
    # Which sizes are open.
    symbolic = open_sizes(gm)
    if symbolic is None:
        return Sizes()
    if not symbolic.symbols:
        return Sizes(fixed=symbolic.closed)
    drop_size_asserts(gm)
    _read_sizes_first(gm)
    sizes = _as_sizes(symbolic, {node.name for node in gm.graph.nodes})
    # Whether the example meets the conditions, without being the only one that does.
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    example = sizes_of(sizes.symbols, names, flat)
    for condition in sizes.conditions:
        if any(condition.text == f"{name} == {size}" for name, size in example.items()):
            raise CaptureError(condition.where)
    if provable:
        sizes = _with_one(sizes, example)
    for condition in sizes.conditions:
        if not condition.holds(example):
            raise CaptureError(f"the example does not meet {condition.text}: {condition.where}")
    # Values without symbols, where every shape is as expected.
    shapes = _expected_shapes(gm, sizes)
    values = _checked(gm, shapes, example, flat)
    for node in gm.graph.nodes:
        if "val" in node.meta and node.name in values:
            node.meta["val"] = values[node.name]
    return _checked_at_one(gm, sizes, shapes, example, flat)


def _read_sizes_first(gm: GraphModule) -> None:
    """Read each tensor's size right after it is computed: who needs the size then needs no tensor."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not SIZE_OF:
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        (inputs[-1] if source.op == "placeholder" else source).append(node)
        # it belongs to the module of the tensor, not to that of its reader
        node.meta["nn_module_stack"] = source.meta.get("nn_module_stack", {})
    gm.graph.lint()


def _as_sizes(symbolic: OpenSizes, present: set[str]) -> Sizes:
    return Sizes(
        symbols=tuple(Symbol(*symbol) for symbol in symbolic.symbols),
        shapes={
            name: tuple(Size(size) if isinstance(size, str) else size for size in shape)
            for name, shape in symbolic.shapes.items()
            if name in present
        },
        numbers={name: Size(text) for name, text in symbolic.numbers.items() if name in present},
        conditions=tuple(Condition(*condition) for condition in symbolic.conditions),
        fixed=symbolic.closed,
    )


def _with_one(sizes: Sizes, example: Mapping[str, int]) -> Sizes:
    """The same sizes with conditions that a batch of one meets too.

    Where other sizes are open as well, none that is about those is changed: what is proven of one sample is
    proven for the example's length.
    """
    one = sizes.of_one_sample(example)
    batch = [symbol.name for symbol in sizes.symbols if not symbol.dim]
    exclude_one = [condition for condition in sizes.conditions if not condition.holds(one)]
    if not all(condition.names <= set(batch) for condition in exclude_one):
        return sizes
    is_one = " and ".join(f"{name} == 1" for name in batch)
    return replace(
        sizes,
        conditions=tuple(
            replace(condition, text=f"{is_one} or ({condition.text})", strict=condition.text)
            if condition in exclude_one
            else condition
            for condition in sizes.conditions
        ),
    )


def _expected_shapes(gm: GraphModule, sizes: Sizes) -> dict[str, tuple[int | Size, ...]]:
    fixed = {
        node.name: tuple(int(size) for size in value.shape)
        for node in gm.graph.nodes
        if node.name not in sizes.shapes and isinstance(value := node.meta.get("val"), Tensor)
    }
    return {**fixed, **sizes.shapes}


def _checked(
    gm: GraphModule, shapes: Mapping[str, tuple[int | Size, ...]], at: Mapping[str, int], flat: Sequence[Any]
) -> dict[str, Any]:
    """Fake values of all nodes, without history.

    Raises:
        CaptureError: one has another shape than expected.
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
    at: Mapping[str, int],
    flat: Sequence[Any],
) -> Sizes:
    """The same sizes, with one more condition where the shapes are not as expected for sizes of 1: of the
    batch, and of all.
    """
    inputs = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    for one in (sizes.of_one_sample(at), dict.fromkeys(at, 1)):
        if one == at or not all(condition.holds(one) for condition in sizes.conditions):
            continue
        example = [
            value.detach().new_empty(evaluated(sizes.shapes[name], one)) if name in sizes.shapes else value
            for name, value in zip(inputs, flat, strict=True)
        ]
        try:
            _checked(gm, shapes, one, example)
        except Exception as error:  # whatever an operator raises for such a shape
            where = (str(error).splitlines() or [type(error).__name__])[0]
            more = [Condition(f"{name} > 1", where) for name in at if one[name] == 1]
            sizes = replace(sizes, conditions=(*sizes.conditions, *more))
    return sizes
