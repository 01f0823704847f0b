"""Where the rows of a batch go in operators that lay elements out in another way."""

from __future__ import annotations

from typing import Any

from partita.cudagraphs.padding.row_call import RowCall, located
from partita.cudagraphs.padding.rows import RowMixing, Rows

__all__ = ["cat", "expand", "permute", "transpose", "unsqueeze", "view"]


def expand(call: RowCall) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return located(call)
    return Rows(rows.dim + call.value.dim() - len(call.shape(source)), rows.block)


def view(call: RowCall) -> Any:
    """The elements stay in order: the rows are where as many elements lie before them."""
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return located(call)
    before = call.batch.product(call.shape(source)[: rows.dim])
    for dim, size in enumerate(call.value.shape):
        if call.batch.within(size):
            block = call.batch.factor(size)
            if block is not None and call.batch.product(call.value.shape[:dim]) == before:
                return Rows(dim, block)
    raise RowMixing("it lays out the rows in a way that can't be followed")


def transpose(call: RowCall) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    if rows is None:
        return None
    given = call.node.args[1:] or (0, 1)
    if len(call.shape(source)) < 2:
        return rows
    first, second = (call.dim_of(source, int(dim)) for dim in given[:2])  # type: ignore[arg-type]
    return Rows({first: second, second: first}.get(rows.dim, rows.dim), rows.block)


def permute(call: RowCall) -> Any:
    source = call.node.args[0]
    rows = call.rows_of(source)
    order = [call.dim_of(source, dim) for dim in call.get("dims")]
    return None if rows is None else Rows(order.index(rows.dim), rows.block)


def unsqueeze(call: RowCall) -> Any:
    source, dim = call.node.args[:2]
    rows = call.rows_of(source)
    if rows is None:
        return None
    place = int(dim) + call.value.dim() if int(dim) < 0 else int(dim)  # type: ignore[arg-type]
    return Rows(rows.dim + (place <= rows.dim), rows.block)


def cat(call: RowCall) -> Any:
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
