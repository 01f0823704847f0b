"""Tensors that are not there yet."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.fake.ghosts import (
    FunctionKind,
    become,
    describe_function,
    ghost_of,
    is_ghostly,
    past_dispatch_modes,
)


def test_a_ghost_becomes_a_tensor_for_everybody_who_holds_it() -> None:
    ghost = ghost_of((2, 3), (1, 2), torch.float64)
    assert is_ghostly(ghost)
    assert (ghost.stride(), ghost.dtype) == ((1, 2), torch.float64)
    references, leaf = [ghost], torch.ones(3, requires_grad=True)
    become(ghost, leaf.view_as(leaf))
    references[0].sum().backward()
    assert not is_ghostly(ghost)
    assert leaf.grad is not None


def test_functions_are_told_apart_by_what_they_look_at() -> None:
    assert describe_function(torch.Tensor.shape.__get__) == (FunctionKind.METADATA, "shape.__get__")  # type: ignore[attr-defined]
    assert describe_function(torch.Tensor.device.__get__)[0] is FunctionKind.DEVICE  # type: ignore[attr-defined]
    assert describe_function(torch.Tensor.add) == (FunctionKind.VALUES, "add")
    assert describe_function(torch._C._set_grad_enabled)[0] is FunctionKind.SETTING
    enter, leave = torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit
    assert describe_function(enter)[0] is FunctionKind.SETTING
    assert describe_function(leave._RecordFunction)[0] is FunctionKind.SETTING
    assert describe_function(torch.Tensor._backward_hooks.__set__)[0] is FunctionKind.SETTING  # type: ignore[attr-defined]


HELD = """
import weakref
import torch
from partita._torch.fake.ghosts import referenced_by_python

x = torch.ones(2, requires_grad=True)
kept, dropped, listed, gone = x * 1, x * 2, [x * 3], x * 4
result = kept * kept + dropped * dropped + listed[0].exp()
references = [weakref.ref(value) for value in (kept, dropped, listed[0], gone)]
del dropped, gone
print([value is not None for value in referenced_by_python(references)], result.requires_grad)
"""


def test_what_only_autograd_keeps_is_held_by_nobody() -> None:
    # In a process of its own: hooks on saved tensors that another test left behind would hold them too.
    done = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[True, False, True, False] True"


class _Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def test_calls_may_go_past_dispatch_modes() -> None:
    x = torch.ones(2)
    with _Refuses(), past_dispatch_modes():
        assert torch.equal(x.clone(), x)
