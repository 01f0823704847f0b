from __future__ import annotations

import torch

from partita._torch.tensors.storage_alias import StorageAlias


def alias_of(tensor: torch.Tensor) -> tuple[StorageAlias, torch.Tensor]:
    """An alias of a contiguous tensor's memory, and the tensor on it of which views are handed out."""
    alias = StorageAlias(tensor.untyped_storage())
    base = torch.empty(0, dtype=tensor.dtype).set_(alias.storage, 0, tensor.shape, tensor.stride())
    alias.count_own_references()
    return alias, base


def test_it_is_free_again_after_the_last_view() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    alias, base = alias_of(tensor)
    assert not alias.is_read
    whole = base.detach()
    part = whole[1, 1:]
    del whole
    assert alias.is_read
    part.fill_(9.0)
    assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 9.0, 9.0]]
    del part
    assert not alias.is_read


def test_a_graph_that_saved_a_view_counts() -> None:
    alias, base = alias_of(torch.ones(3))
    weight = torch.ones(3, requires_grad=True)
    result = (weight * base.detach()).sum()
    assert alias.is_read
    result.backward()
    assert not alias.is_read


def test_who_looks_at_its_storage_or_its_numbers_does_not_count_afterwards() -> None:
    alias, base = alias_of(torch.ones(3))
    view = base.detach()
    assert view.untyped_storage().data_ptr() == view.numpy().ctypes.data
    assert alias.is_read
    del view
    assert not alias.is_read


def test_the_memory_outlives_its_owner() -> None:
    tensor = torch.full((1000,), 3.0)
    alias, base = alias_of(tensor)
    view = base.detach()
    del tensor, base, alias
    torch.zeros(1000)
    assert view.unique().tolist() == [3.0]


def test_memory_of_every_dtype_can_have_an_alias() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int8):
        tensor = torch.zeros(5, dtype=dtype)
        alias = StorageAlias(tensor.untyped_storage())
        assert alias.storage.data_ptr() == tensor.data_ptr()
        assert alias.storage.nbytes() == tensor.untyped_storage().nbytes()
