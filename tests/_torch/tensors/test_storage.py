"""Which tensors have memory, and which share it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from partita._torch.tensors.storage import WeakStorage, has_memory, same_bits, storage_key


def test_a_view_has_the_key_of_its_base() -> None:
    x = torch.zeros(4)
    assert storage_key(x[1:]) == storage_key(x)
    assert storage_key(x.clone()) != storage_key(x)


def test_tensors_without_elements_or_memory_have_keys_too() -> None:
    x, y = torch.zeros(4, device="meta"), torch.zeros(4, device="meta")
    assert storage_key(x.view(2, 2)) == storage_key(x) != storage_key(y)
    empty, other = torch.zeros(0), torch.zeros(0)
    assert storage_key(empty) != storage_key(other)


def test_fake_tensors_share_as_real_ones_do() -> None:
    with FakeTensorMode():
        x = torch.zeros(4)
        assert storage_key(x.t()) == storage_key(x)


def test_a_tensor_without_storage_is_its_own_key() -> None:
    x = torch.eye(2).to_sparse()
    assert storage_key(x) == id(x)


def test_weak_storage_shows_all_of_the_memory_as_long_as_somebody_keeps_it() -> None:
    base = torch.zeros(4)
    weak = WeakStorage(base[1:2])
    content = weak.bytes()
    assert content is not None
    assert content.numel() == 16
    content.fill_(0xFF)
    assert base.isnan().all()
    del content, base
    assert weak.bytes() is None


def test_fake_and_meta_tensors_have_no_memory() -> None:
    real = torch.zeros(2)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
    assert has_memory(real)
    assert has_memory(torch.zeros(0))
    assert not has_memory(fake)
    assert not has_memory(torch.zeros(2, device="meta"))


def test_bits_are_compared_with_kind_and_layout() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, nan * -1)
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert not same_bits(torch.zeros(2, device="meta"), torch.zeros(2, device="meta"))
