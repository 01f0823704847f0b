"""Tied parameters, which several stages hold: which there are, and what a schedule does for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.fx import GraphModule

from partita.errors import CaptureError
from partita.pipelining.interface.routes import Routes, Tied
from partita.pipelining.interface.shared_leaves import shares_of
from partita.pipelining.interface.values import Value
from partita.pipelining.stages.stage import Stage
from partita.pipelining.tied.share_gradients import share_gradients
from partita.pipelining.tied.stepped_once import SteppedOnce
from partita.pipelining.tied.tied_sum import TiedSums
from partita.runtime import Comm

__all__ = ["TiedParameters", "tied_parameters"]


def tied_parameters(modules: Sequence[nn.Module]) -> tuple[Tied, ...]:
    """Return the parameters that more than one stage holds: the same object in several modules.

    Raises:
        CaptureError: several stages hold another tensor that requires gradients, of which each would have its
            own share.
    """
    _check_others(modules)
    holders: dict[int, tuple[nn.Parameter, dict[str, None], dict[int, None]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            _, names, stages = holders.setdefault(id(parameter), (parameter, {}, {}))
            names[name] = None
            stages[stage] = None
    return tuple(
        Tied(tuple(names), tuple(stages), Value.of(f"parameter:{next(iter(names))}", parameter))
        for parameter, names, stages in holders.values()
        if len(stages) > 1
    )


def _check_others(modules: Sequence[nn.Module]) -> None:
    holders: dict[int, int] = {}
    for stage, module in enumerate(modules):
        for name, tensor in _trained_others(module):
            first = holders.setdefault(id(tensor), stage)
            if first != stage:
                raise CaptureError(shares_of(repr(name), (first, stage)))


def _trained_others(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors besides parameters that a stage holds by name and that require a gradient."""
    for name, tensor in module.named_buffers():
        if tensor.requires_grad:
            yield name, tensor
    for path, part in module.named_modules() if isinstance(module, GraphModule) else ():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.requires_grad:
                yield f"{path}.{name}" if path else name, value


class TiedParameters:
    """The tied parameters of one rank. As long as it lives, no optimizer applies one gradient twice
    (`SteppedOnce`).

    Args:
        stages: the stages of this rank, by index.
        stage_ranks: the rank of each stage.
    """

    def __init__(self, comm: Comm, stages: Mapping[int, Stage], stage_ranks: tuple[int, ...]) -> None:
        self._comm = comm
        self._stages = stages
        self._stage_ranks = stage_ranks
        self._stepped_once = SteppedOnce(stages.values())
        self._sums = TiedSums(comm, stages, stage_ranks)

    def begin(self, routes: Routes) -> None:
        """Prepare for a step that trains.

        Raises:
            ExecutionError: a tied parameter has hooks, or is sharded, and the schedule's ``tied_gradients``
                does not support that.
        """
        self._sums = TiedSums(self._comm, self._stages, self._stage_ranks)
        self._sums.begin(routes.tied)

    def end(self, routes: Routes, step: int) -> None:
        """After the step of this number, give every copy the whole gradient. Collective.

        Raises:
            ExecutionError: copies of one parameter are not equal any more.
        """
        self._sums.end(step)
        share_gradients(self._comm, self._stages, self._stage_ranks, routes, step)
