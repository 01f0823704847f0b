"""Changes to a model and its optimizers that are undone where an error interrupts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from partita.pipelining.checkpoints.contents.checkpoint_source import Incoming
from partita.pipelining.checkpoints.contents.own_state import LoadableState

__all__ = ["Undo", "put", "unchanged_on_error"]

Undo = list[Callable[[], object]]
"""Functions that each undo one change, in the order in which the changes were made."""


@contextmanager
def unchanged_on_error(states: Iterable[LoadableState], optimizers: Sequence[Optimizer]) -> Iterator[Undo]:
    """Restore what only modules themselves can load, optimizers and random numbers where the block raises,
    and undo what it has added to the list.
    """
    before = [*(state.keep() for state in states), *map(_optimizer, optimizers)]
    random_numbers = _random_numbers()
    undo: Undo = []
    try:
        yield undo
    except BaseException as error:
        # The modules' own code first: whatever it does to tensors and random numbers is undone after it.
        for action in (*before, *reversed(undo), random_numbers):
            try:
                action()
            except Exception as problem:  # the others are undone all the same
                error.add_note(f"(not all is as it was before: {type(problem).__name__}: {problem})")
        raise


def _random_numbers() -> Callable[[], object]:
    cpu = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore


def _optimizer(optimizer: Optimizer) -> Callable[[], object]:
    # ``load_state_dict`` replaces these objects, so keeping them is enough.
    state, groups = optimizer.state, optimizer.param_groups

    def restore() -> None:
        optimizer.state, optimizer.param_groups = state, groups

    return restore


def put(incoming: Incoming, undo: Undo) -> None:
    """Copy values into a model's tensors. Each is freed when the tensor's old value has been saved (on the
    CPU, unless it is sharded), so that both together take no more memory than before.
    """
    while incoming:
        tensor, value = incoming.pop()
        before = tensor.clone() if isinstance(tensor, DTensor) else tensor.to("cpu", copy=True)
        undo.append(partial(tensor.copy_, before))
        tensor.copy_(value)
