"""Where the rows of a batch go in each operator that keeps them apart.

An operator that is not here mixes rows as far as anybody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from partita._torch.batch import BatchSize
from partita._torch.capture_ops import capture_facts, operator_of
from partita.cudagraphs.rows import RowMixing, Rows
from partita.graph.effects import metadata
from partita.graph.use import nodes_in

__all__ = ["rows_after"]

Places: TypeAlias = Callable[[Node], Any]
_Rule: TypeAlias = Callable[["_Call"], Any]


def rows_after(node: Node, places: Places, batch: BatchSize) -> Any:
    """The rows of a node's result; a tuple for several results.

    Raises:
        RowMixing: no rule, or the rows meet.
    """
    call = _Call(node, places, batch)
    operator = operator_of(node)
    name = "" if operator is None else capture_facts(operator).name.partition("::")[2]
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(places(call.nodes[0]), tuple):
        return places(call.nodes[0])[node.args[1]]
    if not isinstance(metadata(node), (torch.Tensor, tuple, list)):
        if any(call.rows) and not name.startswith(("sym_", "_assert_")):
            raise RowMixing("the host reads something from rows")
        return None  # a number made of sizes
    rule = _RULES.get(name)
    if rule is None and operator is not None and capture_facts(operator).pointwise:
        rule = _pointwise
    if rule is None:
        if not any(call.rows) and not batch.within((node.args, node.kwargs)):
            return _none(call)
        raise RowMixing("nobody knows that it keeps the rows of a batch apart")
    return rule(call)


class _Call:
    """One call, with what the rules ask for."""

    def __init__(self, node: Node, places: Places, batch: BatchSize) -> None:
        self.node = node
        self.places = places
        self.batch = batch
        self.nodes = tuple(node.all_input_nodes)
        self.rows = [places(operand) for operand in self.nodes]
        self.value = metadata(node)
        schema = getattr(node.target, "_schema", None)
        arguments = schema.arguments if schema is not None else []
        self.named: dict[str, Any] = {
            **{argument.name: argument.default_value for argument in arguments},
            **dict(zip([argument.name for argument in arguments], node.args, strict=False)),
            **node.kwargs,
        }

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        return self.named.get(name, default)

    def rows_of(self, argument: Any) -> Rows | None:
        """The rows of a tensor argument."""
        return self.places(argument) if isinstance(argument, Node) else None

    def shape(self, argument: Any) -> Any:
        return metadata(argument).shape

    def dim_of(self, argument: Any, dim: int) -> int:
        """A dimension counted from 0."""
        rank = len(self.shape(argument))
        return dim + rank if dim < 0 else dim

    def numbers_free(self, *names: str) -> None:
        """These arguments must not depend on the batch size."""
        for name in names:
            if self.batch.within(
                [item for item in _flat(self.get(name)) if not isinstance(item, Node)]
            ) or any(
                not isinstance(metadata(item), torch.Tensor) and self.batch.within(item)
                for item in nodes_in(self.get(name))
            ):
                raise RowMixing(f"its argument {name!r} depends on the batch size")


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, (list, tuple)) else [value]


def _none(call: _Call) -> Any:
    return tuple(None for _ in call.value) if isinstance(call.value, (tuple, list)) else None


def _all(call: _Call, rows: Rows | None) -> Any:
    """The same rows for each result."""
    return tuple(rows for _ in call.value) if isinstance(call.value, (tuple, list)) else rows


def _aligned(call: _Call, operands: Any, rank: int) -> Rows | None:
    """The rows of operands that are broadcast together to ``rank`` dimensions."""
    found: set[tuple[int, Any]] = set()
    for operand in operands:
        rows = call.rows_of(operand)
        if rows is not None:
            found.add((rows.dim - len(call.shape(operand)), rows.block))
    if len(found) > 1:
        raise RowMixing("its operands have the batch in different dimensions")
    return next((Rows(dim + rank, block) for dim, block in found), None)


def _pointwise(call: _Call) -> Any:
    numbers = _flat((*call.node.args, *call.node.kwargs.values()))
    for item in numbers:
        value = metadata(item) if isinstance(item, Node) else item
        if not isinstance(value, torch.Tensor) and call.batch.within(value):
            raise RowMixing("it takes the batch size as a number")
    operands = [operand for operand in call.nodes if isinstance(metadata(operand), torch.Tensor)]
    rank = call.value.dim() if isinstance(call.value, torch.Tensor) else 0
    rows = _aligned(call, operands, rank)
    if rows is None and call.batch.within(call.value):
        raise RowMixing("its result has the size of the batch, and none of its operands")
    return rows


def _same(call: _Call) -> Any:
    """The first tensor's rows."""
    return _all(call, call.rows_of(call.node.args[0]))


def _created(call: _Call) -> Any:
    """Values that are the same in each row, or count from the first row on."""
    call.numbers_free("fill_value", "start", "step", "s")
    if any(call.rows):
        raise RowMixing("its values depend on the rows")
    return _located(call)


def _located(call: _Call) -> Any:
    sizes = [dim for dim, size in enumerate(call.value.shape) if call.batch.within(size)]
    if not sizes:
        return None
    block = call.batch.factor(call.value.shape[sizes[0]])
    if len(sizes) > 1 or block is None:
        raise RowMixing("more than one dimension of its result depends on the batch size")
    return Rows(sizes[0], block)


def _expand(call: _Call) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return _located(call)
    return Rows(rows.dim + call.value.dim() - len(call.shape(source)), rows.block)


def _view(call: _Call) -> Any:
    """The elements stay in order: the rows are where as many elements lie before them."""
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return _located(call)
    before = call.batch.product(call.shape(source)[: rows.dim])
    for dim, size in enumerate(call.value.shape):
        if call.batch.within(size):
            block = call.batch.factor(size)
            if block is not None and call.batch.product(call.value.shape[:dim]) == before:
                return Rows(dim, block)
    raise RowMixing("it lays out the rows in a way that can't be followed")


def _transpose(call: _Call) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return None
    given = call.node.args[1:] or (0, 1)
    if len(call.shape(source)) < 2:
        return rows
    first, second = (call.dim_of(source, int(dim)) for dim in given[:2])  # type: ignore[arg-type]
    return Rows({first: second, second: first}.get(rows.dim, rows.dim), rows.block)


def _permute(call: _Call) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    order = [call.dim_of(source, dim) for dim in call.get("dims")]
    return None if rows is None else Rows(order.index(rows.dim), rows.block)


def _unsqueeze(call: _Call) -> Any:
    source, dim = call.node.args[:2]
    rows = call.rows_of(source)
    if rows is None:
        return None
    place = int(dim) + call.value.dim() if int(dim) < 0 else int(dim)  # type: ignore[arg-type]
    return Rows(rows.dim + (place <= rows.dim), rows.block)


def _over_dims(call: _Call) -> Any:
    """Works along some dimensions, which are kept, or dropped from the result."""
    source = call.node.args[0]
    rows = call.rows_of(source)
    if any(item is not None for item in call.rows[1:]):
        raise RowMixing("an operand besides its first has the batch too")
    if rows is None:
        if call.batch.within((call.node.args, call.node.kwargs)):
            raise RowMixing("it takes the batch size as a number")
        return _none(call)
    call.numbers_free("start", "end", "index", "split_size", "split_sizes", "k", "sections", "correction")
    given = call.get("dim", call.get("dims"))
    dims = [call.dim_of(source, dim) for dim in ([given] if isinstance(given, int) else given or ())]
    if "squeeze" in str(call.node.target):
        dims = [dim for dim in dims if call.shape(source)[dim] == 1]
        if not dims and given not in (None, []):
            return rows
    if not dims or rows.dim in dims:
        raise RowMixing("it works along the batch" if dims else "it works along all dimensions")
    first = call.value[0] if isinstance(call.value, (tuple, list)) else call.value
    dropped = len(call.shape(source)) - first.dim()
    below = sum(dim < rows.dim for dim in dims) if dropped else 0
    return _all(call, Rows(rows.dim - below, rows.block))


def _slice(call: _Call) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return _over_dims(call)
    same = call.value.shape[rows.dim] == call.shape(source)[rows.dim]
    if same and call.dim_of(source, call.get("dim", 0)) == rows.dim and call.get("step", 1) == 1:
        return rows  # all of it
    return _over_dims(call)


def _cat(call: _Call) -> Any:
    parts = call.node.args[0]
    assert isinstance(parts, (list, tuple))
    stacked = call.value.dim() > len(call.shape(parts[0]))
    found = {call.rows_of(part) for part in parts}
    if found == {None}:
        return None
    if len(found) > 1:
        raise RowMixing("not all of what it joins has the batch in the same dimension")
    rows = next(iter(found))
    assert rows is not None
    dim = int(call.get("dim", 0))
    place = dim + call.value.dim() if dim < 0 else dim
    if not stacked and place == rows.dim:
        raise RowMixing("it joins along the batch")
    return Rows(rows.dim + (stacked and place <= rows.dim), rows.block)


def _matmul(call: _Call) -> Any:
    """``mm``, ``addmm``, ``bmm``, ``baddbmm``."""
    *added, left, right = call.node.args
    rows = _product(call.rows_of(left), call.rows_of(right), call.value.dim())
    if _aligned(call, added, call.value.dim()) not in (None, rows):
        raise RowMixing("what it adds has the batch elsewhere")
    return rows


def _product(a: Rows | None, b: Rows | None, rank: int) -> Rows | None:
    if a is None and b is None:
        return None
    if rank == 3 and a == b and a is not None and a.dim == 0:
        return a
    if a is not None and b is None and a.dim == rank - 2:
        return a
    if b is not None and a is None and b.dim == rank - 1:
        return b
    raise RowMixing("it sums over the batch, or multiplies rows with each other")


def _norm(call: _Call) -> Any:
    source, shape = call.node.args[:2]
    rows = call.rows_of(source)
    if any(item is not None for item in call.rows[1:]):
        raise RowMixing("its weights depend on the batch")
    if rows is not None and rows.dim >= len(call.shape(source)) - len(shape):  # type: ignore[arg-type]
        raise RowMixing("it normalises over the batch")
    return _all(call, rows)


def _embedding(call: _Call) -> Any:
    weight, indices = call.node.args[:2]
    if call.rows_of(weight) is not None:
        raise RowMixing("its table depends on the batch")
    return call.rows_of(indices)


def _gather(call: _Call) -> Any:
    source, dim, index = call.node.args[:3]
    rows = call.rows_of(source)
    if rows is None and call.rows_of(index) is None:
        return None
    if rows is None or rows != call.rows_of(index) or rows.dim == call.dim_of(source, int(dim)):  # type: ignore[arg-type]
        raise RowMixing("it picks rows of the batch, or has an index for other rows")
    return rows


def _index(call: _Call) -> Any:
    source, indices = call.node.args[:2]
    assert isinstance(indices, (list, tuple))
    rows = call.rows_of(source)
    given = [index for index in indices if index is not None]
    if rows is not None:
        picks = len(indices) > rows.dim and indices[rows.dim] is not None
        if (
            picks
            or len(given) != 1
            or any(call.rows_of(index) for index in given)
            or len(call.shape(given[0])) != 1
        ):
            raise RowMixing("it picks rows of the batch by an index")
        return rows
    if len(given) < len(indices):
        if any(call.rows_of(index) for index in given):
            raise RowMixing("it picks by an index in a way that can't be followed")
        return None
    rank = max(len(call.shape(index)) for index in given)
    return _aligned(call, given, rank)


def _index_copy(call: _Call) -> Any:
    """``index_copy``, ``slice_scatter``, ``select_scatter``: writes along one dimension."""
    source = call.node.args[0]
    rows = call.rows_of(source)
    written = call.get("source", call.get("src"))
    call.numbers_free("start", "end", "index")
    if rows is None and not any(call.rows):
        return None
    if rows is None or rows.dim == call.dim_of(source, int(call.get("dim", 0))):
        raise RowMixing("it writes along the batch")
    if isinstance(call.get("index"), Node) and call.rows_of(call.get("index")) is not None:
        raise RowMixing("where it writes depends on the row")
    shift = len(call.shape(source)) - len(call.shape(written))
    below = shift if call.dim_of(source, int(call.get("dim", 0))) < rows.dim else 0
    if call.rows_of(written) != Rows(rows.dim - below, rows.block):
        raise RowMixing("what it writes has the batch elsewhere")
    return rows


def _batched(call: _Call) -> Any:
    """One sample after the other: convolutions, pooling, normalisation with known statistics."""
    rows = call.rows_of(call.node.args[0])
    if any(item is not None for item in call.rows[1:]):
        raise RowMixing("its weights depend on the batch")
    if rows is None:
        return _none(call)
    if rows.dim != 0 or rows.block != 1:
        raise RowMixing("the batch is not its first dimension")
    if not isinstance(call.value, (tuple, list)):
        return rows
    return tuple(
        rows if isinstance(part, torch.Tensor) and call.batch.within(part.shape) else None
        for part in call.value
    )


def _attention(call: _Call) -> Any:
    if call.get("dropout_p", 0.0):
        raise RowMixing("it drops out, and more rows draw more random numbers")
    query, key, value = (call.rows_of(argument) for argument in call.node.args[:3])
    if query is None and not any(call.rows):
        return _none(call)
    if query is None or not query == key == value or query.dim != 0:
        raise RowMixing("query, key and value don't all have the batch first")
    mask = call.get("attn_mask", call.get("attn_bias"))
    if isinstance(mask, Node) and call.rows_of(mask) not in (None, Rows(0, query.block)):
        raise RowMixing("its mask has the batch elsewhere")
    assert isinstance(call.value, (tuple, list))
    return tuple(
        query if isinstance(part, torch.Tensor) and part.dim() and call.batch.within(part.shape[0]) else None
        for part in call.value
    )


def _triangle(call: _Call) -> Any:
    rows = call.rows_of(call.node.args[0])
    if rows is not None and rows.dim >= len(call.shape(call.node.args[0])) - 2:
        raise RowMixing("it cuts a triangle out of the batch")
    return rows


def _copy(call: _Call) -> Any:
    """``copy_`` to an input, at the end of a graph."""
    target, source = (call.rows_of(argument) for argument in call.node.args[:2])
    if target != source:
        raise RowMixing("it writes rows of the batch to what all rows share")
    return target


def _named(rule: _Rule, *names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names, rule)


_RULES: Mapping[str, _Rule] = {
    **_named(_same, "clone", "detach", "alias", "_to_copy", "lift_fresh_copy", "zeros_like", "ones_like"),
    **_named(_created, "full", "zeros", "ones", "empty", "arange", "scalar_tensor"),
    **_named(_expand, "expand"),
    **_named(_view, "view", "_unsafe_view", "reshape"),
    **_named(_transpose, "transpose", "t"),
    **_named(_permute, "permute"),
    **_named(_unsqueeze, "unsqueeze"),
    **_named(_slice, "slice"),
    **_named(_cat, "cat", "stack"),
    **_named(_matmul, "mm", "addmm", "bmm", "baddbmm"),
    **_named(_norm, "native_layer_norm", "_fused_rms_norm"),
    **_named(_embedding, "embedding"),
    **_named(_gather, "gather"),
    **_named(_index, "index"),
    **_named(_index_copy, "index_copy", "slice_scatter", "select_scatter"),
    **_named(_triangle, "tril", "triu"),
    **_named(_copy, "copy_"),
    **_named(
        _batched,
        "convolution",
        "_native_batch_norm_legit_no_training",
        "native_group_norm",
        "max_pool2d_with_indices",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
    ),
    **_named(
        _attention,
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    **_named(
        _over_dims,
        "sum",
        "mean",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "var",
        "std",
        "var_mean",
        "any",
        "all",
        "max",
        "min",
        "logsumexp",
        "linalg_vector_norm",
        "_softmax",
        "_safe_softmax",
        "_log_softmax",
        "cumsum",
        "cumprod",
        "sort",
        "topk",
        "flip",
        "select",
        "squeeze",
        "split",
        "split_with_sizes",
        "unbind",
    ),
}
