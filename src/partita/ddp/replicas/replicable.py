"""Which modules can be replicated, and why others can't."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from partita.errors import ArgumentError

__all__ = ["check_replicable", "sparse_weights"]

_EMBEDDINGS = nn.Embedding, nn.EmbeddingBag


def check_replicable(
    module: nn.Module,
    named: dict[str, nn.Parameter],
    trained: dict[str, nn.Parameter],
    listed: Mapping[str, Collection[str]],
    taken: Mapping[str, nn.Module | None],
    sparse: Collection[str],
) -> None:
    """Refuse what the buckets can't serve.

    Args:
        named: all parameters.
        trained: those that require a gradient and are not ignored.
        listed: names of parameters and buffers, by the argument that has them.
        taken: parameters that belong to a replicated module already, and that module.
        sparse: names of those that get sparse gradients, see `sparse_weights`.

    Raises:
        ArgumentError: the message names the parameter, and what to do.
    """
    names = named.keys() | {name for name, _ in module.named_buffers()}
    for argument, chosen in listed.items():
        unknown = sorted(set(chosen) - names)
        if unknown:
            raise ArgumentError(f"{argument} names {unknown[0]!r}, which the module does not have")
    if not trained:
        raise ArgumentError(
            "the module has no parameter that requires a gradient: there is nothing to reduce"
        )
    for name, parameter in trained.items():
        if name in taken:
            raise _taken(name, module, taken[name])
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ArgumentError(
                f"parameter {name!r} has no shape yet: run the module once before replicate()"
            )
        if isinstance(parameter, DTensor):
            raise ArgumentError(
                f"parameter {name!r} is a DTensor ({', '.join(map(str, parameter.placements))}), and buckets "
                "reduce plain tensors: fully_shard(module, mesh=...) over a dimension of the mesh of its own "
                "reduces sharded gradients"
            )
        if parameter.device.type == "meta":
            raise ArgumentError(
                f"parameter {name!r} is on the meta device: load or initialise it before replicate()"
            )
    for name, child in module.named_modules():
        if isinstance(child, _EMBEDDINGS) and child.sparse:
            continue
        for parameter in child.parameters(recurse=False):
            tied = next((weight for weight in sparse if trained[weight] is parameter), None)
            if tied is not None:
                raise ArgumentError(
                    f"{tied!r} is the weight of an embedding with sparse gradients and a parameter of "
                    f"{name!r} ({type(child).__name__}) too, whose gradients are dense: build the embedding "
                    "with sparse=False"
                )


def _taken(name: str, module: nn.Module, other: nn.Module | None) -> ArgumentError:
    """The error for a parameter that belongs to another replicated module already."""
    if other is None or module in other.modules() or other in module.modules():
        return ArgumentError(
            f"parameter {name!r} belongs to a replicated module already: replicate the outer one only"
        )
    return ArgumentError(
        f"parameter {name!r} belongs to another module too, which is replicated already: replicate one that "
        "has both, such as a torch.nn.ModuleList of them, and keep it"
    )


def sparse_weights(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Return the names of the parameters that get sparse gradients."""
    weights = {
        id(child.weight) for child in module.modules() if isinstance(child, _EMBEDDINGS) and child.sparse
    }
    return frozenset(name for name, parameter in trained.items() if id(parameter) in weights)
