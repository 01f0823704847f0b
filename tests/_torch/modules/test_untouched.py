from __future__ import annotations

import pytest
import torch
from torch import nn

from partita._torch.modules.untouched import untouched
from partita.errors import ExecutionError


def test_a_module_that_is_left_alone_is_none_of_its_business() -> None:
    with untouched(nn.BatchNorm1d(2)):
        pass


def test_what_was_replaced_is_named_and_put_back() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    before = module[0].running_mean

    def change() -> None:
        with untouched(module):
            module[0].running_mean = torch.ones(2)
            module[0].extra = 1

    with pytest.raises(ExecutionError, match=r"reaches the module itself and changes '0\.extra' of it"):
        change()
    assert module[0].running_mean is before
    assert not hasattr(module[0], "extra")


def test_what_was_written_to_is_named() -> None:
    module = nn.BatchNorm1d(2)
    with pytest.raises(ExecutionError, match="changes 'running_var' of it"), untouched(module):
        module.running_var.add_(1)


def test_the_blocks_own_error_goes_first() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight

    def fail() -> None:
        with untouched(module):
            module.weight = nn.Parameter(torch.zeros(2, 2))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert module.weight is weight
