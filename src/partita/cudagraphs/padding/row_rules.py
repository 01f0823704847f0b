"""Where the rows of a batch go in each operator that keeps them apart.

An operator that is not here mixes rows as far as anybody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from partita._torch.export.batch_size import BatchSize
from partita._torch.operators.capturable import capture_facts, operator_of
from partita.cudagraphs.padding.row_call import (
    Places,
    RowCall,
    aligned,
    flat,
    in_each_result,
    located,
    no_rows,
)
from partita.cudagraphs.padding.row_layout import cat, expand, permute, transpose, unsqueeze, view
from partita.cudagraphs.padding.rows import RowMixing, Rows
from partita.graph.effects import metadata

__all__ = ["rows_after"]

_Rule: TypeAlias = Callable[[RowCall], Any]


def rows_after(node: Node, places: Places, batch: BatchSize) -> Any:
    """The rows of a node's result; a tuple for several results.

    Raises:
        RowMixing: no rule, or the rows meet.
    """
    call = RowCall(node, places, batch)
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
            return no_rows(call)
        raise RowMixing("nobody knows that it keeps the rows of a batch apart")
    return rule(call)


def _pointwise(call: RowCall) -> Any:
    numbers = flat((*call.node.args, *call.node.kwargs.values()))
    for item in numbers:
        value = metadata(item) if isinstance(item, Node) else item
        if not isinstance(value, torch.Tensor) and call.batch.within(value):
            raise RowMixing("it takes the batch size as a number")
    operands = [operand for operand in call.nodes if isinstance(metadata(operand), torch.Tensor)]
    rank = call.value.dim() if isinstance(call.value, torch.Tensor) else 0
    rows = aligned(call, operands, rank)
    if rows is None and call.batch.within(call.value):
        raise RowMixing("its result has the size of the batch, and none of its operands")
    return rows


def _same(call: RowCall) -> Any:
    """The first tensor's rows."""
    return in_each_result(call, call.rows_of(call.node.args[0]))


def _created(call: RowCall) -> Any:
    """Values that are the same in each row, or count from the first row on."""
    call.numbers_free("fill_value", "start", "step", "s")
    if any(call.rows):
        raise RowMixing("its values depend on the rows")
    return located(call)


def _over_dims(call: RowCall) -> Any:
    """Works along some dimensions, which are kept, or dropped from the result."""
    source = call.node.args[0]
    rows = call.rows_of(source)
    if any(item is not None for item in call.rows[1:]):
        raise RowMixing("an operand besides its first has the batch too")
    if rows is None:
        if call.batch.within((call.node.args, call.node.kwargs)):
            raise RowMixing("it takes the batch size as a number")
        return no_rows(call)
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
    return in_each_result(call, Rows(rows.dim - below, rows.block))


def _slice(call: RowCall) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return _over_dims(call)
    same = call.value.shape[rows.dim] == call.shape(source)[rows.dim]
    if same and call.dim_of(source, call.get("dim", 0)) == rows.dim and call.get("step", 1) == 1:
        return rows  # all of it
    return _over_dims(call)


def _matmul(call: RowCall) -> Any:
    """``mm``, ``addmm``, ``bmm``, ``baddbmm``."""
    *added, left, right = call.node.args
    rows = _product(call.rows_of(left), call.rows_of(right), call.value.dim())
    if aligned(call, added, call.value.dim()) not in (None, rows):
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


def _norm(call: RowCall) -> Any:
    source, shape = call.node.args[:2]
    rows = call.rows_of(source)
    if any(item is not None for item in call.rows[1:]):
        raise RowMixing("its weights depend on the batch")
    if rows is not None and rows.dim >= len(call.shape(source)) - len(shape):  # type: ignore[arg-type]
        raise RowMixing("it normalises over the batch")
    return in_each_result(call, rows)


def _embedding(call: RowCall) -> Any:
    weight, indices = call.node.args[:2]
    if call.rows_of(weight) is not None:
        raise RowMixing("its table depends on the batch")
    return call.rows_of(indices)


def _gather(call: RowCall) -> Any:
    source, dim, index = call.node.args[:3]
    rows = call.rows_of(source)
    if rows is None and call.rows_of(index) is None:
        return None
    if rows is None or rows != call.rows_of(index) or rows.dim == call.dim_of(source, int(dim)):  # type: ignore[arg-type]
        raise RowMixing("it picks rows of the batch, or has an index for other rows")
    return rows


def _index(call: RowCall) -> Any:
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
    return aligned(call, given, rank)


def _index_copy(call: RowCall) -> Any:
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


def _batched(call: RowCall) -> Any:
    """One sample after the other: convolutions, pooling, normalisation with known statistics."""
    rows = call.rows_of(call.node.args[0])
    if any(item is not None for item in call.rows[1:]):
        raise RowMixing("its weights depend on the batch")
    if rows is None:
        return no_rows(call)
    if rows.dim != 0 or rows.block != 1:
        raise RowMixing("the batch is not its first dimension")
    if not isinstance(call.value, (tuple, list)):
        return rows
    return tuple(
        rows if isinstance(part, torch.Tensor) and call.batch.within(part.shape) else None
        for part in call.value
    )


def _attention(call: RowCall) -> Any:
    if call.get("dropout_p", 0.0):
        raise RowMixing("it drops out, and more rows draw more random numbers")
    query, key, value = (call.rows_of(argument) for argument in call.node.args[:3])
    if query is None and not any(call.rows):
        return no_rows(call)
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


def _triangle(call: RowCall) -> Any:
    rows = call.rows_of(call.node.args[0])
    if rows is not None and rows.dim >= len(call.shape(call.node.args[0])) - 2:
        raise RowMixing("it cuts a triangle out of the batch")
    return rows


def _copy(call: RowCall) -> Any:
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
    **_named(expand, "expand"),
    **_named(view, "view", "_unsafe_view", "reshape"),
    **_named(transpose, "transpose", "t"),
    **_named(permute, "permute"),
    **_named(unsqueeze, "unsqueeze"),
    **_named(_slice, "slice"),
    **_named(cat, "cat", "stack"),
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
