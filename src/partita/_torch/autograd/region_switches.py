"""The functions that tracers put into graphs to enter and leave autograd and autocast regions."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import grad_mode

__all__ = [
    "AUTOCAST_DEVICES",
    "EMPTY_CACHE",
    "ENTER_AUTOCAST",
    "ENTER_INFERENCE",
    "EXIT_AUTOCAST",
    "EXIT_INFERENCE",
    "REGION_SWITCHES",
    "SET_GRAD",
    "OpenRegions",
    "autocast_nesting",
    "autocast_off",
    "is_any_autocast_enabled",
    "is_barrier_function",
    "leave_open",
    "level_change",
    "set_autocast_nesting",
]

SET_GRAD: Any = torch._C._set_grad_enabled
ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST: Any = torch.amp.autocast_mode._exit_autocast
ENTER_INFERENCE: Any = grad_mode._enter_inference_mode
EXIT_INFERENCE: Any = grad_mode._exit_inference_mode
REGION_SWITCHES = frozenset({SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST, ENTER_INFERENCE, EXIT_INFERENCE})
"""Enter or leave a region and compute nothing: each piece of a graph enters and leaves regions on its own."""

AUTOCAST_DEVICES = tuple(dict.fromkeys(("cpu", "cuda", getattr(torch._C._get_accelerator(), "type", "cpu"))))
"""Those that a program here can enter an autocast region for."""

_SETTERS = (
    "set_default_dtype",
    "set_default_device",
    "set_default_tensor_type",
    "set_deterministic_debug_mode",
    "set_float32_matmul_precision",
    "set_flush_denormal",
    "set_grad_enabled",
    "set_num_threads",
    "set_autocast_enabled",
    "set_autocast_dtype",
    "set_autocast_cache_enabled",
    "set_autocast_cpu_enabled",
    "set_autocast_cpu_dtype",
    "set_autocast_gpu_dtype",
    "use_deterministic_algorithms",
    "autocast_increment_nesting",
    "autocast_decrement_nesting",
    "clear_autocast_cache",
)
_BARRIERS = frozenset(
    id(function) for name in _SETTERS if (function := getattr(torch, name, None)) is not None
)
_PREFIXES = (
    "_set_",
    "set_",
    "_push_",
    "_pop_",
    "_vmap_",
    "_grad_",
    "_jvp_",
    "_func_",
    "_enter_",
    "_exit_",
    "_saved_tensors_hooks",
)


def is_barrier_function(target: Any) -> bool:
    """Whether ``target`` changes interpreter-wide torch state that can't be re-entered elsewhere.

    Named setters of ``torch``, and by their prefix the private ones of ``torch._C`` (functorch's levels,
    saved-tensor hooks, dispatch modes), which dynamo puts into graphs.
    """
    if id(target) in _BARRIERS:
        return True
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    if module == "torch.nn.attention" and name == "_sdpa_kernel":
        return True
    if module.startswith("torch.backends") and not name.startswith(("is_", "get_", "can_")):
        return True
    if module.startswith("torch.autograd") and name.startswith("set_"):
        return True
    return module.startswith(("torch._C", "torch._functorch")) and name.startswith(_PREFIXES)


def level_change(target: Any) -> int:
    """1 where ``target`` opens a level of ``torch.func`` (``vmap``, ``grad``), -1 where it closes one.

    Tensors of a level are of no use outside of it.
    """
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if not module.startswith(("torch._C", "torch._functorch")):
        return 0
    if name.endswith("_increment_nesting"):
        return 1
    return -1 if name.endswith("_decrement_nesting") else 0


class _Scopes(threading.local):
    """How many of autocast's nesting levels are ours, in this thread."""

    open = 0


_SCOPES = _Scopes()


class CacheScope:
    """Closes a scope of autocast's cache that an exception has skipped, as soon as its frame goes."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.left = False

    def __del__(self) -> None:
        if not self.left and self._thread == threading.get_ident():  # the nesting is each thread's own
            LEAVE_CACHE_SCOPE(self)


def ENTER_CACHE_SCOPE() -> CacheScope | None:  # noqa: N802  (a graph function, named as the others here)
    """Keep autocast's cache of converted weights alive until the matching `LEAVE_CACHE_SCOPE`.

    A region that spans several pieces is left and entered again between them, which would empty the cache,
    so that a weight used on both sides would be converted twice and its gradient summed in another precision.
    """
    torch.autocast_increment_nesting()
    _SCOPES.open += 1
    return None if torch.compiler.is_compiling() else CacheScope()


def LEAVE_CACHE_SCOPE(scope: CacheScope | None) -> None:  # noqa: N802
    """The end of an `ENTER_CACHE_SCOPE`; the outermost empties the cache, as leaving the region would."""
    if scope is not None:
        scope.left = True
    _SCOPES.open -= 1
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


def EMPTY_CACHE() -> None:  # noqa: N802
    """Forget converted weights, as leaving an outermost region would: unless the caller has a region open."""
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == _SCOPES.open:
        torch.clear_autocast_cache()


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is on for some device; costs a fraction of asking for a tensor's."""
    return torch._C._is_any_autocast_enabled()


def autocast_off() -> AbstractContextManager[None]:
    """No autocast for any device within the block: for what runs a graph that has its casts written in it."""
    off: AbstractContextManager[None] = torch._C._DisableAutocast()
    return off


def autocast_nesting() -> int:
    """How many autocast regions are open in this thread, one within the other; without `ENTER_CACHE_SCOPE`'s.

    >>> with torch.autocast("cpu"):
    ...     autocast_nesting()
    1
    """
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting()) - _SCOPES.open


def set_autocast_nesting(nesting: int) -> None:
    """Set how many regions count as open: code that an exception has ended may not have left its own."""
    difference = nesting - autocast_nesting()
    for _ in range(difference):
        torch.autocast_increment_nesting()
    for _ in range(-difference):
        torch.autocast_decrement_nesting()
    if nesting + _SCOPES.open == 0:
        torch.clear_autocast_cache()


class OpenRegions(NamedTuple):
    """The grad and autocast regions that are open in this thread."""

    grad: bool
    nesting: int
    caches: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> OpenRegions:
        """Return those that are open now. Nothing that a tracer would see is called."""
        casts = tuple(
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES
        )
        return cls(torch.is_grad_enabled(), autocast_nesting(), torch.is_autocast_cache_enabled(), casts)

    def put_back(self) -> None:
        """Open these again, and no others, after code that an exception has ended."""
        with torch._C.DisableTorchFunction():
            torch.set_grad_enabled(self.grad)
            for device, enabled, dtype in self.casts:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(self.caches)
            set_autocast_nesting(self.nesting)


def leave_open(before: OpenRegions, error: BaseException, code: CodeType) -> None:
    """Leave the regions that a graph has entered before an error in its code, as a ``with`` block would: the
    calls that leave them have been skipped.

    Args:
        before: what was open when the graph was called.
        error: as it was caught.
        code: of the function that runs the graph.
    """
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code is not code:
        entry = entry.tb_next
    if entry is not None:
        for value in reversed(list(entry.tb_frame.f_locals.values())):  # the innermost first
            if isinstance(value, torch._C._InferenceMode):
                value.__exit__(None, None, None)
            elif isinstance(value, CacheScope) and not value.left:
                LEAVE_CACHE_SCOPE(value)
    before.put_back()


for _function in (ENTER_CACHE_SCOPE, LEAVE_CACHE_SCOPE, EMPTY_CACHE):
    torch.fx.node.has_side_effect(_function)
for _around in (OpenRegions.now, leave_open):
    # called around a graph that Dynamo compiles, and no part of it: torch 2.11 can't trace them either
    set_code_exec_strategy(_around.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
