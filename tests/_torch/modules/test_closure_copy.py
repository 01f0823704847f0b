from __future__ import annotations

import copy
import functools
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita._torch.modules.closure_copy import with_closures


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


def _twin(module: nn.Module) -> nn.Module:
    with with_closures() as memo:
        return copy.deepcopy(module, memo)


def _calls_of_the_twin(module: Counted) -> tuple[int, int]:
    twin = _twin(module)
    assert torch.equal(twin(torch.ones(2)), torch.full((2,), 2.0))
    return module.calls, twin.calls


def test_a_forward_that_calls_the_old_one_calls_that_of_the_copy() -> None:
    module = Counted()
    old = module.forward
    module.forward = lambda x: old(x)  # type: ignore[method-assign]
    assert _calls_of_the_twin(module) == (0, 1)


def test_wrapped_partial_and_default_arguments_are_followed() -> None:
    wrapped, bound, default = Counted(), Counted(), Counted()
    old = wrapped.forward

    @functools.wraps(old)
    def forward(*args: Any) -> Tensor:
        return old(*args)

    wrapped.forward = forward  # type: ignore[method-assign]
    inner = functools.partial(bound.forward)
    bound.forward = lambda x: inner(x)  # type: ignore[method-assign]
    default.forward = lambda x, *, call=default.forward: call(x)  # type: ignore[method-assign,misc]
    assert [_calls_of_the_twin(module) for module in (wrapped, bound, default)] == [(0, 1)] * 3
    assert _twin(wrapped).forward.__wrapped__.__self__ is not wrapped


def test_hooks_and_modules_in_containers_are_followed() -> None:
    outer, seen = nn.Sequential(Counted()), []
    containers = {"inner": [outer[0]]}
    outer.register_forward_hook(lambda *_: seen.append(containers["inner"][0].calls))
    twin = _twin(outer)
    twin(torch.ones(2))
    assert (outer[0].calls, twin[0].calls, seen) == (0, 1, [])


def test_functions_that_share_a_variable_share_it_in_the_copy() -> None:
    module, count = nn.Identity(), 0

    def add() -> None:
        nonlocal count
        count += 1

    module.add, module.get = add, lambda: count
    twin = _twin(module)
    twin.add()
    assert (module.get(), twin.get()) == (0, 1)


def test_functions_without_a_closure_and_other_copies_are_as_ever() -> None:
    module, layer = nn.Identity(), nn.Linear(2, 2)
    module.plain, module.closed = torch.nn.functional.relu, lambda: layer
    with with_closures():
        assert copy.deepcopy(module.closed) is module.closed
    assert _twin(module).plain is module.plain
    assert copy.deepcopy(module).closed is module.closed


def test_what_is_no_part_of_the_module_is_shared() -> None:
    module, log = nn.Identity(), object()
    module.get = lambda: log
    assert _twin(module).get() is log


def test_a_copy_within_a_larger_one_enters_what_it_has_copied() -> None:
    """And may share what belongs to no module that is copied."""
    module, other = Counted(), nn.Linear(2, 2)
    module.get, module.relu, module.other = lambda: module, lambda x: x + 1, lambda: other
    memo: dict[Any, Any] = {}
    with with_closures(memo, others_shared=True) as own:
        twin = copy.deepcopy(module, own)
    assert twin.get() is twin
    assert (twin.relu, twin.other()) == (module.relu, other)
    assert copy.deepcopy([module], memo)[0] is twin
    assert not [key for key in memo if isinstance(key, str)]


def test_a_larger_copy_goes_on_as_it_began() -> None:
    """The memo of the copy within it was another dict, and what that one kept alive stayed under its
    identity: a dict that came to lie there was this list in the larger copy.
    """
    memo: dict[Any, Any] = {}
    with with_closures(memo, others_shared=True) as own:
        copy.deepcopy([nn.Linear(2, 2)], own)
    kept_alive = memo.pop(id(memo))
    assert kept_alive
    assert not [key for key, value in memo.items() if value is kept_alive]


def test_cached_functions_and_weak_references_lead_to_the_copy() -> None:
    """They led to the original: proofs left gradients in the parameters of the user's own model."""
    module, layer, log = Counted(), nn.Linear(2, 2), object()
    reference = weakref.ref(module)
    module.cached = functools.lru_cache(maxsize=3)(lambda: module)
    module.method = functools.cache(module.extra_repr)
    module.weak, module.through = reference, lambda: reference()
    module.other = functools.cache(lambda: log)
    module.of_layer, module.layer = functools.cache(layer.extra_repr), layer
    twin = _twin(module)
    assert twin.of_layer.__wrapped__.__self__ is twin.layer is not layer
    assert twin.cached() is twin.weak() is twin.through() is twin
    assert twin.cached.cache_parameters()["maxsize"] == 3
    assert twin.method.__wrapped__.__self__ is twin
    assert twin.other() is log
    assert module.cached() is module.weak() is module


def test_what_has_no_copy_is_shared_and_other_copies_are_as_ever() -> None:
    """A layer that synchronises its statistics has a process group, and no stage by modules could be made."""
    module = nn.SyncBatchNorm(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module.process_group = dist.group.WORLD
        module.lock, module.library = threading.Lock(), torch
        twin = _twin(module)
        assert twin.process_group is module.process_group
        assert twin.lock is module.lock
        assert twin.library is torch
        with with_closures(), pytest.raises(TypeError, match="cannot pickle"):
            copy.deepcopy(module)
    finally:
        dist.destroy_process_group()
