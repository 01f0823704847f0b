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
from partita.cudagraphs.padding.row_call import RowCall, RowMixing, Rows, RowsOf, rows_by_shape
from partita.cudagraphs.padding.row_layout import cat, expand, permute, transpose, unsqueeze, view
from partita.graph.effects import metadata

__all__ = ["rows_after"]

_Rule: TypeAlias = Callable[[RowCall], Any]


def rows_after(node: Node, rows_of: RowsOf, batch: BatchSize) -> Any:
    """Return the rows of a node's result; a tuple for several results.

    Raises:
        RowMixing: no rule, or the rows meet.
    """
    call = RowCall(node, rows_of, batch)
    operator = operator_of(node)
    name = "" if operator is None else capture_facts(operator).name.partition("::")[2]

    # 1. What has rules of its own: one of several results, and numbers made of sizes.
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(call.rows[0], tuple):
        return call.rows[0][node.args[1]]  # type: ignore[index]
    if not isinstance(call.value, (torch.Tensor, tuple, list)):
        if any(call.rows) and not name.startswith(("sym_", "_assert_")):
            raise RowMixing("the host reads something from rows")
        return None

    # 2. Without rows in its operands, a node has none either, or makes them from the batch size.
    if not any(call.rows):
        if not batch.within((node.args, node.kwargs)):
            return call.same_in_each_result(None)
        if name not in _MAKES_ROWS:
            raise RowMixing("it takes the batch size as a number")
        assert isinstance(call.value, torch.Tensor)
        call.refuse_batch_size("fill_value", "start", "step", "s")
        rows = rows_by_shape(call.value, batch)
        if rows is None and batch.within(call.value.shape):
            raise RowMixing("more than one dimension of its result depends on the batch size")
        return rows

    # 3. Rows go where the operator's rule says.
    rule = _RULES.get(name)
    if rule is None and operator is not None and capture_facts(operator).pointwise:
        rule = _pointwise
    if rule is None:
        raise RowMixing("nobody knows that it keeps the rows of a batch apart")
    if name not in _TAKES_SIZES and call.takes_batch_size:
        raise RowMixing("it takes the batch size as a number")
    return rule(call)


def _pointwise(call: RowCall) -> Any:
    tensors = [operand for operand in call.operands if isinstance(metadata(operand), torch.Tensor)]
    return call.same_in_each_result(call.broadcast_rows(tensors, call.rank))


def _same(call: RowCall) -> Any:
    return call.same_in_each_result(call.rows_of_first())


def _over_dims(call: RowCall) -> Any:
    """Works along some dimensions, which are kept, or dropped from the result."""
    source, rows = call.node.args[0], call.rows_of_first()
    along = call.get("dim", call.get("dims"))
    dims = [call.dim_of(source, dim) for dim in ([along] if isinstance(along, int) else along or ())]
    if "squeeze" in str(call.node.target):
        dims = [dim for dim in dims if call.shape(source)[dim] == 1]
        if not dims and along not in (None, []):
            return rows
    if not dims or rows.dim in dims:
        raise RowMixing("it works along the batch" if dims else "it works along all dimensions")
    dropped = len(call.shape(source)) > call.rank
    below = sum(dim < rows.dim for dim in dims) if dropped else 0
    return call.same_in_each_result(Rows(rows.dim - below, rows.block))


def _slice(call: RowCall) -> Any:
    source, rows = call.node.args[0], call.rows_of_first()
    same_size = call.value.shape[rows.dim] == call.shape(source)[rows.dim]
    if same_size and call.dim_of(source, call.get("dim", 0)) == rows.dim and call.get("step", 1) == 1:
        return rows  # all of it
    call.refuse_batch_size("start", "end")
    return _over_dims(call)


def _matmul(call: RowCall) -> Any:
    """``mm``, ``addmm``, ``bmm``, ``baddbmm``."""
    *added, left, right = call.node.args
    rows = _product(call.rows_of(left), call.rows_of(right), call.rank)
    if call.broadcast_rows(added, call.rank) not in (None, rows):
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
    rows = call.rows_of_first("its weights depend on the batch")
    if rows.dim >= len(call.shape(source)) - len(shape):  # type: ignore[arg-type]
        raise RowMixing("it normalises over the batch")
    return call.same_in_each_result(rows)


def _embedding(call: RowCall) -> Any:
    weight, indices = call.node.args[:2]
    if call.rows_of(weight) is not None:
        raise RowMixing("its table depends on the batch")
    return call.rows_of(indices)


def _gather(call: RowCall) -> Any:
    source, dim, index = call.node.args[:3]
    rows = call.rows_of(source)
    if rows is None or rows != call.rows_of(index) or rows.dim == call.dim_of(source, int(dim)):  # type: ignore[arg-type]
        raise RowMixing("it picks rows of the batch, or has an index for other rows")
    return rows


def _index(call: RowCall) -> Any:
    source, indices = call.node.args[:2]
    assert isinstance(indices, (list, tuple))
    rows = call.rows_of(source)
    tensors = [index for index in indices if index is not None]
    if rows is None:  # the indices have rows
        if len(tensors) < len(indices):
            raise RowMixing("it picks by an index in a way that can't be followed")
        return call.broadcast_rows(tensors, max(len(call.shape(index)) for index in tensors))
    along_rows = len(indices) > rows.dim and indices[rows.dim] is not None
    one_list = len(tensors) == 1 and len(call.shape(tensors[0])) == 1
    if along_rows or not one_list or any(call.rows_of(index) for index in tensors):
        raise RowMixing("it picks rows of the batch by an index")
    return rows


def _index_copy(call: RowCall) -> Any:
    """``index_copy``, ``slice_scatter``, ``select_scatter``: writes along one dimension."""
    source, written = call.node.args[0], call.get("source", call.get("src"))
    rows, dim = call.rows_of(source), call.dim_of(source, int(call.get("dim", 0)))
    if rows is None or rows.dim == dim:
        raise RowMixing("it writes along the batch")
    if call.rows_of(call.get("index")) is not None:
        raise RowMixing("where it writes depends on the row")
    missing = len(call.shape(source)) - len(call.shape(written))
    below = missing if dim < rows.dim else 0
    if call.rows_of(written) != Rows(rows.dim - below, rows.block):
        raise RowMixing("what it writes has the batch elsewhere")
    return rows


def _batched(call: RowCall) -> Any:
    """One sample after the other: convolutions, pooling, normalisation with known statistics."""
    rows = call.rows_of_first("its weights depend on the batch")
    if rows != Rows(0):
        raise RowMixing("the batch is not its first dimension")
    return call.batch_first_in_results(rows)


def _attention(call: RowCall) -> Any:
    if call.get("dropout_p", 0.0):
        raise RowMixing("it drops out, and more rows draw more random numbers")
    query, key, value = (call.rows_of(argument) for argument in call.node.args[:3])
    if query is None or not query == key == value or query.dim != 0:
        raise RowMixing("query, key and value don't all have the batch first")
    if call.rows_of(call.get("attn_mask", call.get("attn_bias"))) not in (None, Rows(0, query.block)):
        raise RowMixing("its mask has the batch elsewhere")
    return call.batch_first_in_results(query)


def _triangle(call: RowCall) -> Any:
    rows = call.rows_of_first()
    if rows.dim >= call.rank - 2:
        raise RowMixing("it cuts a triangle out of the batch")
    return rows


def _copy(call: RowCall) -> Any:
    """``copy_`` to an input, at the end of a graph."""
    target, source = (call.rows_of(argument) for argument in call.node.args[:2])
    if target != source:
        raise RowMixing("it writes rows of the batch to what all rows share")
    return target


def _rules(rule: _Rule, names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


_MAKES_ROWS = frozenset(["arange", "empty", "expand", "full", "ones", "scalar_tensor", "zeros"])
_TAKES_SIZES = frozenset(
    ["expand", "native_group_norm", "native_layer_norm", "reshape", "slice", "view", "_unsafe_view"]
)
"""Operators that may take the batch size as a number: their rules look at what they do with it."""

_RULES: Mapping[str, _Rule] = {
    **_rules(_same, "clone detach alias _to_copy lift_fresh_copy zeros_like ones_like"),
    **_rules(expand, "expand"),
    **_rules(view, "view _unsafe_view reshape"),
    **_rules(transpose, "transpose t"),
    **_rules(permute, "permute"),
    **_rules(unsqueeze, "unsqueeze"),
    **_rules(cat, "cat stack"),
    **_rules(_slice, "slice"),
    **_rules(_over_dims, "sum mean amax amin argmax argmin var std var_mean any all max min logsumexp"),
    **_rules(_over_dims, "linalg_vector_norm _softmax _safe_softmax _log_softmax cumsum cumprod sort topk"),
    **_rules(_over_dims, "flip select squeeze split split_with_sizes unbind"),
    **_rules(_matmul, "mm addmm bmm baddbmm"),
    **_rules(_norm, "native_layer_norm _fused_rms_norm"),
    **_rules(_embedding, "embedding"),
    **_rules(_gather, "gather"),
    **_rules(_index, "index"),
    **_rules(_index_copy, "index_copy slice_scatter select_scatter"),
    **_rules(_triangle, "tril triu"),
    **_rules(_copy, "copy_"),
    **_rules(_batched, "convolution _native_batch_norm_legit_no_training native_group_norm"),
    **_rules(_batched, "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d"),
    **_rules(_attention, "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention"),
    **_rules(
        _attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
    ),
}
