from __future__ import annotations

import pytest
from tests.group_of_one import group_of_one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from partita.errors import CaptureError
from partita.fsdp import annotate_modules_for_dynamo, audit


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.Tanh())


def test_a_module_that_was_added_after_wrapping_is_missed() -> None:
    wrapped = model()
    annotate_modules_for_dynamo(wrapped, (), use_orig_params=True)
    assert audit(wrapped).ok
    wrapped[1].append(nn.Dropout())
    outcome = audit(wrapped)
    assert outcome.missed == ("1.1",)
    with pytest.raises(CaptureError, match=r"missed: '1\.1': added after wrapping\?"):
        outcome.check()


def test_ignored_modules_are_listed_with_all_that_is_inside() -> None:
    wrapped = model()
    annotate_modules_for_dynamo(wrapped, {wrapped[1]}, use_orig_params=True)
    outcome = audit(wrapped, {wrapped[1]})
    assert outcome.ignored == ("1", "1.0")
    assert outcome.managed == ("", "0", "2")
    assert outcome.ok
    outcome.check()


def test_modules_of_ignored_parameters_are_not_missed() -> None:
    """They were called missed, as were all layers without parameters: fully_shard leaves out both."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    wrapped = nn.Sequential(nn.Linear(2, 2), inner, nn.BatchNorm1d(2))
    with group_of_one():
        ignored = {*wrapped[1].parameters(), *wrapped[2].parameters()}
        fully_shard(wrapped, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)
        outcome = audit(wrapped, ignored_params=ignored)
    assert outcome.ignored == ("1", "1.0", "1.1")
    assert outcome.managed == ("", "0", "2")  # fully_shard takes a module with buffers
    outcome.check()


def test_what_stands_outside_of_every_managed_module_is_not_missed() -> None:
    outer = nn.Sequential(model(), nn.ReLU())
    annotate_modules_for_dynamo(outer[0], (), use_orig_params=True)
    assert audit(outer).outside == ("", "1")
    assert audit(outer).ok


def test_modules_that_torch_compile_would_run_eagerly_are_named() -> None:
    wrapped = nn.Sequential(nn.ReLU())
    with pytest.warns(UserWarning, match="use_orig_params"):
        annotate_modules_for_dynamo(wrapped, (), use_orig_params=False)
    with pytest.warns(UserWarning, match="wrapped with use_orig_params=False, so torch.compile makes no"):
        outcome = audit(wrapped)
    assert outcome.eager == ("", "0")
    with pytest.raises(CaptureError, match="wrapped with use_orig_params=False"):
        outcome.check()
