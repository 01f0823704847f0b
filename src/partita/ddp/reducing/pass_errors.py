"""What can go wrong in a backward pass, in words: the cause, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import torch

from partita.errors import ExecutionError
from partita.runtime import Comm

__all__ = [
    "another_gradient",
    "changed_parameter",
    "failed_everywhere",
    "other_layout",
    "raised_on_some",
    "refuse_compiled_autograd",
    "unfinished_pass",
    "wrapping_gradient",
]


def failed_everywhere(comm: Comm, message: str, where: str) -> ExecutionError:
    """Return the error to raise; all other ranks get it too."""
    error = ExecutionError(message)
    with suppress(ExecutionError):  # where the others can't be told, this rank raises it all the same
        comm.fail(error, where)
    return error


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="partita.ddp.replicate does not work under compiled autograd: turn it off"
)
def refuse_compiled_autograd() -> NoReturn:
    """Called where the compiler traces a whole backward pass, and so what follows each gradient: the trace
    breaks off here, and this runs.
    """
    raise ExecutionError(
        "compiled autograd traces the backward pass, so a replicated module's gradients can't be reduced "
        "while it runs: turn it off (torch._dynamo.config.compiled_autograd = False, no "
        "maybe_enable_compiled_autograd block) and compile the module with backend='partita_ddp', whose "
        "backward graph is reduced in buckets"
    )


def other_layout(name: str, gradient: torch.Tensor) -> str:
    """A parameter has got a sparse gradient and is not the weight of a sparse embedding, or the other way."""
    is_sparse = gradient.layout is not torch.strided
    has, weight = ("sparse", "not the weight") if is_sparse else ("dense", "the weight")
    return (
        f"the gradient of {name!r} is {has}, and the parameter is {weight} of an nn.Embedding or "
        "nn.EmbeddingBag with sparse=True, by which ranks know how to reduce it: let all that uses it agree "
        f"with that, or leave it out with ignored=[{name!r}] and reduce it yourself"
    )


def wrapping_gradient(name: str, gradient: torch.Tensor) -> str:
    """A parameter has got a gradient that wraps other tensors, which have memory of their own."""
    return (
        f"the gradient of {name!r} is a {type(gradient).__name__}, which wraps other tensors, and buckets "
        "reduce plain tensors: give the module plain inputs, let its forward hand on a plain tensor before "
        f"this parameter is used, or leave it out with ignored=[{name!r}] and reduce what is wrapped yourself"
    )


def another_gradient(name: str) -> str:
    """A parameter has got a gradient after its bucket was sent."""
    return (
        f"parameter {name!r} got another gradient after its bucket had been sent: it is used both by a "
        "compiled graph and outside of it, which the first backward pass did not show; use it in one of the "
        f"two, or pass late=[{name!r}] to replicate(), which waits for all of its gradients"
    )


def changed_parameter(name: str) -> str:
    """A hook has changed a parameter between its gradient and the end of the pass."""
    return (
        f"parameter {name!r} was changed in the backward pass, before its gradient was averaged over the "
        "ranks, so replicas would drift apart: call the optimizer's step() after backward(), not in a hook"
    )


def raised_on_some(raised: Sequence[bool]) -> str:
    """A pass has raised on some ranks, and gone well on others."""
    bad = ", ".join(str(rank) for rank, here in enumerate(raised) if here)
    return (
        f"the backward pass raised on rank {bad} and not on the others, so its gradients are not whole: "
        "start again from a checkpoint, or, where no optimizer has taken a step since, call zero_grad() and "
        "take the next batch on every rank"
    )


def unfinished_pass(missing: Sequence[str]) -> str:
    """A pass begins, and the one before is not over; ``missing`` are names without a gradient."""
    what = (
        f"{len(missing)} parameters, {missing[0]!r} among them, got no gradient" if missing else "it raised"
    )
    return (
        f"the backward pass before did not come to its end ({what}): with reentrant checkpoints every "
        "parameter has to get a gradient, and an exception leaves the ranks out of step, so start again from "
        "a checkpoint, with torch.utils.checkpoint(..., use_reentrant=False)"
    )
