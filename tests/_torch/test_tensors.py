from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from partita._torch.tensors import has_memory


def test_fake_and_meta_tensors_have_no_memory() -> None:
    real = torch.zeros(2)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
    assert has_memory(real)
    assert has_memory(torch.zeros(0))
    assert not has_memory(fake)
    assert not has_memory(torch.zeros(2, device="meta"))
