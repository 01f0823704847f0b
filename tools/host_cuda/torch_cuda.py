"""``torch.cuda`` for a device whose memory is the host's: what torch built without CUDA leaves out."""

# ruff: noqa: SLF001, TID251 - it stands in for a part of torch
from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tools.host_cuda.graphs import CUDAGraph
from torch import Tensor

__all__ = ["install"]

_NAME = "host"
_MEMORY = 16 * 2**30


class _Stream:
    """The one stream. What is put into it is done at once."""

    device = torch.device("cuda", 0)
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what ``torch.cuda.Stream`` takes."""

    def synchronize(self, *_: Any) -> None:
        """Nothing is under way."""

    wait_stream = wait_event = record_event = synchronize


def install() -> None:
    """Let ``torch.cuda`` name the device. ``library.load`` must have been called before torch was there."""
    cuda: Any = torch.cuda
    generator: Any = torch.ops.host_cuda.default_generator()
    properties = SimpleNamespace(
        name=_NAME,
        major=9,
        minor=0,
        total_memory=_MEMORY,
        multi_processor_count=1,
        gcnArchName="",
        warp_size=32,
        L2_cache_size=2**20,
        is_integrated=False,
    )
    cuda.default_generators = (generator,)
    cuda.Stream, cuda.CUDAGraph = _Stream, CUDAGraph
    constants: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "mem_get_info": (_MEMORY, _MEMORY),
        "get_device_name": _NAME,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        "stream": contextlib.nullcontext(),
        **dict.fromkeys(("init", "_lazy_init", "set_device", "synchronize", "empty_cache")),
    }
    for name, value in constants.items():
        setattr(cuda, name, _returning(value))
    functions: dict[str, Callable[..., Any]] = {
        "_lazy_call": lambda function, **_: function(),
        "is_current_stream_capturing": CUDAGraph.is_capturing,
        "graph_pool_handle": lambda: object(),  # a new one each time
        "seed": generator.seed,
        "seed_all": lambda: generator.seed(),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda _="cuda": generator.get_state(),
        "set_rng_state": lambda state, _="cuda": generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
    }
    for name, function in functions.items():
        setattr(cuda, name, function)
    bindings: Any = torch._C
    bindings._cuda_getCurrentRawStream = _returning(0)
    bindings._cuda_clearCublasWorkspaces = _returning(None)
    _complete_tensors()


def _returning(value: Any) -> Callable[..., Any]:
    """A function of its own for each name: Dynamo has a handler for each."""
    return lambda *_, **__: value


def _complete_tensors() -> None:
    """Let storages be made on the device, and move there."""
    tensor, storage = torch.Tensor, torch.UntypedStorage
    new: Callable[..., Any] = storage.__new__

    def made(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is not None and torch.device(device).type == "cuda":
            return torch.empty(*(args or (0,)), dtype=torch.uint8, device="cuda").untyped_storage()
        options = kwargs if device is None else {**kwargs, "device": device}
        result: torch.UntypedStorage = new(cls, *args, **options)
        return result

    def moved(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        device = torch.device(device)
        if self.device.type == device.type:
            return self
        as_bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return as_bytes.to(device, non_blocking=non_blocking, copy=True).untyped_storage()

    def without_stream(self: Tensor, stream: Any) -> None:
        """Memory is reused in the order of calls."""

    own: dict[type, dict[str, Any]] = {
        tensor: {"record_stream": without_stream},
        storage: {
            "__new__": staticmethod(made),
            "to": moved,
            "cpu": lambda self: moved(self, device="cpu"),
            "cuda": lambda self, device="cuda", **_: moved(self, device=device or "cuda"),
        },
    }
    for cls, methods in own.items():
        for name, method in methods.items():
            setattr(cls, name, method)
