"""Where the rows of a batch go in operators that lay elements out in another way."""

from __future__ import annotations

from partita.cudagraphs.padding.row_call import RowCall, RowMixing, Rows

__all__ = ["cat", "expand", "permute", "transpose", "unsqueeze", "view"]


def expand(call: RowCall) -> Rows:
    rows = call.rows_of_first()
    return Rows(rows.dim + call.rank - len(call.shape(call.node.args[0])), rows.block)


def view(call: RowCall) -> Rows:
    """The elements stay in order: the rows are where as many elements lie before them."""
    rows = call.rows_of_first()
    before = call.batch.product(call.shape(call.node.args[0])[: rows.dim])
    for dim, size in enumerate(call.value.shape):
        if call.batch.within(size):
            block = call.batch.factor(size)
            if block is not None and call.batch.product(call.value.shape[:dim]) == before:
                return Rows(dim, block)
    raise RowMixing("it lays out the rows in a way that can't be followed")


def transpose(call: RowCall) -> Rows:
    rows, source = call.rows_of_first(), call.node.args[0]
    if call.rank < 2:
        return rows
    dims = call.node.args[1:] or (0, 1)
    first, second = (call.dim_of(source, int(dim)) for dim in dims[:2])  # type: ignore[arg-type]
    return Rows({first: second, second: first}.get(rows.dim, rows.dim), rows.block)


def permute(call: RowCall) -> Rows:
    rows = call.rows_of_first()
    order = [call.dim_of(call.node.args[0], dim) for dim in call.get("dims")]
    return Rows(order.index(rows.dim), rows.block)


def unsqueeze(call: RowCall) -> Rows:
    rows, dim = call.rows_of_first(), int(call.get("dim"))
    new = dim + call.rank if dim < 0 else dim
    return Rows(rows.dim + (new <= rows.dim), rows.block)


def cat(call: RowCall) -> Rows:
    """``cat`` and ``stack``, which puts a new dimension before the rows or behind them."""
    rows, parts = call.rows[0], call.node.args[0]
    assert isinstance(parts, (list, tuple))
    if rows is None or any(call.rows_of(part) != rows for part in parts):
        raise RowMixing("not all of what it joins has the batch in the same dimension")
    stacked = call.rank > len(call.shape(parts[0]))
    dim = int(call.get("dim", 0))
    along = dim + call.rank if dim < 0 else dim
    if not stacked and along == rows.dim:
        raise RowMixing("it joins along the batch")
    return Rows(rows.dim + (stacked and along <= rows.dim), rows.block)
