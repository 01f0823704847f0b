"""The ways of sharded training that the benchmark ``fsdp_overlap`` compares."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.compiled_pipeline import Gated, TransformerBlock
from benchmarks.ddp_models import Blocks, with_own_code
from partita.fsdp import annotate_modules_for_dynamo

__all__ = ["EAGER", "MODELS", "UNMARKED", "WAYS", "Setting", "Sizes", "make_model"]

EAGER, UNMARKED = "eager", "compiled, unmarked"
"""What the other ways are measured against."""

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


@dataclass(frozen=True)
class Sizes:
    """How large a model of Llama's kind and its batch are.

    Attributes:
        rows: of a batch, for each rank.
        tokens: of a row.
    """

    blocks: int
    width: int
    rows: int
    tokens: int

    def batch(self, seed: int) -> Tensor:
        """Draw a batch; float32, (rows, tokens, width)."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.rows, self.tokens, self.width, generator=generator)


MODELS = {"llama": Sizes(6, 384, rows=4, tokens=128), "tiny": Sizes(2, 16, rows=1, tokens=4)}


def make_model(sizes: Sizes) -> Any:
    """Make a model, the same on every rank, with code of its own.

    Dynamo keeps what it has compiled by code: else one way of training would run the graphs of another.
    """
    torch.manual_seed(0)
    root, inner = with_own_code(Blocks), with_own_code(TransformerBlock)
    return root(sizes.blocks, lambda: inner(sizes.width, Gated(sizes.width), rotary=True))


@dataclass(frozen=True)
class Setting:
    """What every way trains.

    Attributes:
        mesh: of all ranks.
        backend: compiles what is compiled.
    """

    sizes: Sizes
    mesh: DeviceMesh
    backend: Any

    def sharded(self, *, compile_blocks: bool = False) -> Any:
        """Make the model with each block and the whole in `fully_shard`, which marks all modules."""
        model = make_model(self.sizes)
        for block in model.blocks:
            if compile_blocks:
                block.compile(backend=self.backend)
            fully_shard(block, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)


def _eager(setting: Setting) -> Any:
    return setting.sharded()


def _unmarked(setting: Setting) -> Any:
    model = setting.sharded()
    _unmark(model)
    return torch.compile(model, backend=setting.backend)


def _marked(setting: Setting) -> Any:
    model = setting.sharded()
    _unmark(model)
    annotate_modules_for_dynamo(model, (), use_orig_params=True)
    return torch.compile(model, backend=setting.backend)


def _block_by_block(setting: Setting) -> Any:
    """As torchtitan compiles: FSDP's hooks stand around what is compiled."""
    return setting.sharded(compile_blocks=True)


def _unmark(model: nn.Module) -> None:
    for module in model.modules():
        for name in _MARKS:
            vars(module).pop(name, None)


def _prefetching(way: Callable[[Setting], Any]) -> Callable[[Setting], Any]:
    """The same; each block's parameters are gathered while the one before it computes.

    By default FSDP gathers ahead on CUDA's streams. On CPUs it waits for each collective where it starts it,
    unless it is told to start them asynchronously; sums of gradients it waits for at any rate.
    """

    def make(setting: Setting) -> Any:
        model = way(setting)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        blocks = [*getattr(model, "_orig_mod", model).blocks]
        for module in sharded:
            module._set_unshard_async_op(True)  # noqa: SLF001
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
        return model

    return make


_PLAIN: dict[str, Callable[[Setting], Any]] = {
    EAGER: _eager,
    UNMARKED: _unmarked,
    "compiled, annotated": _marked,
    "compiled by block": _block_by_block,
}
WAYS: dict[str, Callable[[Setting], Any]] = _PLAIN | {
    f"{name}, prefetching": _prefetching(way) for name, way in _PLAIN.items()
}
"""From its name to what makes the model that is trained, in the order in which they take their turns."""
