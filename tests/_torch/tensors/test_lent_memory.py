from __future__ import annotations

import torch

from partita._torch.tensors.lent_memory import LentMemory


def lent_to(tensor: torch.Tensor) -> tuple[LentMemory, torch.Tensor]:
    """The memory of a contiguous tensor, lent, and the tensor of which views are handed out."""
    lent = LentMemory(tensor.untyped_storage())
    base = torch.empty(0, dtype=tensor.dtype).set_(lent.storage, 0, tensor.shape, tensor.stride())
    lent.count_own_references()
    return lent, base


def test_it_is_given_back_with_the_last_view() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    lent, base = lent_to(tensor)
    assert not lent.is_read
    whole = base.detach()
    part = whole[1, 1:]
    del whole
    assert lent.is_read
    part.fill_(9.0)
    assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 9.0, 9.0]]
    del part
    assert not lent.is_read


def test_a_graph_that_saved_it_has_it() -> None:
    lent, base = lent_to(torch.ones(3))
    weight = torch.ones(3, requires_grad=True)
    result = (weight * base.detach()).sum()
    assert lent.is_read
    result.backward()
    assert not lent.is_read


def test_who_looks_at_its_storage_or_its_numbers_does_not_count_afterwards() -> None:
    lent, base = lent_to(torch.ones(3))
    view = base.detach()
    assert view.untyped_storage().data_ptr() == view.numpy().ctypes.data
    assert lent.is_read
    del view
    assert not lent.is_read


def test_lent_memory_outlives_its_owner() -> None:
    tensor = torch.full((1000,), 3.0)
    lent, base = lent_to(tensor)
    view = base.detach()
    del tensor, base, lent
    torch.zeros(1000)
    assert view.unique().tolist() == [3.0]


def test_memory_of_every_dtype_can_be_lent() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int8):
        tensor = torch.zeros(5, dtype=dtype)
        lent = LentMemory(tensor.untyped_storage())
        assert lent.storage.data_ptr() == tensor.data_ptr()
        assert lent.storage.nbytes() == tensor.untyped_storage().nbytes()
