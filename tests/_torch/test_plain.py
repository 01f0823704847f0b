from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from partita._torch.plain import is_plain_tensor


def test_parameters_and_fakes_are_plain_and_wrappers_are_not() -> None:
    with FakeTensorMode():
        assert is_plain_tensor(torch.ones(1))
    assert is_plain_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not is_plain_tensor(TwoTensor(torch.ones(1), torch.ones(1)))
    assert not is_plain_tensor(1.0)
