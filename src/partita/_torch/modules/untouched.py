"""A check that code which works on a copy of a module leaves the module itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from partita.errors import ExecutionError

__all__ = ["untouched"]


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Check that the block does not change ``module``.

    Raises:
        ExecutionError: where the block ends with an attribute, a parameter, a buffer or a submodule of it
            replaced, removed or added, or a tensor written to. All but what was written is put back first.
    """
    before = [(name, _tables(child)) for name, child in module.named_modules()]
    tensors = [(name, tensor, tensor._version) for name, tensor in _tensors(module)]
    try:
        yield
    finally:
        changed = [f"{name}.{key}" for name, tables in before for key in _put_back(tables)]
    changed += [name for name, tensor, version in tensors if tensor._version != version]
    if changed:
        raise ExecutionError(
            f"a copy of the module reaches the module itself and changes {changed[0].lstrip('.')!r} of it"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_inference():  # those count no versions
            yield name, tensor


def _tables(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each dictionary that a module keeps attributes in, with a copy of it."""
    own = vars(module)
    return [(table, dict(table)) for table in (own, own["_parameters"], own["_buffers"], own["_modules"])]


def _put_back(tables: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    """Restore the dictionaries from their copies, and yield the names of what had changed."""
    for table, before in tables:
        names = [name for name in {**before, **table} if not _is_same(before, table, name)]
        if names:
            table.clear()
            table.update(before)
            yield from names


def _is_same(before: Mapping[str, Any], table: Mapping[str, Any], name: str) -> bool:
    return name in before and name in table and before[name] is table[name]
