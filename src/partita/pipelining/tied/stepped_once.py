"""The check that no two optimizers step a parameter that stages of one rank share.

Where a rank has several stages and an optimizer for each of them, a tied weight is in two optimizers, and
both would apply its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.pipelining.stages.optimizer_steps import before_optimizers_step, stepped_by
from partita.pipelining.stages.stage import Stage

__all__ = ["SteppedOnce"]


_Step = tuple["weakref.ref[Tensor]", int, "weakref.ref[Optimizer]"]
"""A gradient, how often it had been written to, and the optimizer that applied it."""


class SteppedOnce:
    """As long as it lives, raises ExecutionError where an optimizer is about to apply a gradient again.

    Args:
        stages: the stages of one rank.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        holders: dict[nn.Parameter, tuple[str, list[int]]] = {}
        for stage in stages:
            for name, parameter in stage.module.named_parameters():
                holders.setdefault(parameter, (name, []))[1].append(stage.index)
        self._shared = {parameter: named for parameter, named in holders.items() if len(named[1]) > 1}
        self._stepped: dict[nn.Parameter, _Step] = {}
        if self._shared:
            before_optimizers_step(self, SteppedOnce._before_step)

    def _before_step(self, optimizer: Optimizer) -> None:
        gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in stepped_by(optimizer):
            if parameter in self._shared and parameter.grad is not None:
                if parameter in gradients or self._was_stepped(parameter, parameter.grad, optimizer):
                    self._refuse(parameter)
                gradients[parameter] = parameter.grad
        for parameter, gradient in gradients.items():
            self._stepped[parameter] = weakref.ref(gradient), times_written(gradient), weakref.ref(optimizer)

    def _was_stepped(self, parameter: nn.Parameter, gradient: Tensor, optimizer: Optimizer) -> bool:
        """Whether another optimizer has applied this very gradient."""
        if parameter not in self._stepped:
            return False
        stepped, writes, by = self._stepped[parameter]
        return stepped() is gradient and writes == times_written(gradient) and by() is not optimizer

    def _refuse(self, parameter: nn.Parameter) -> None:
        name, stages = self._shared[parameter]
        raise ExecutionError(
            f"{name!r} is one parameter of the stages {stages} of this rank, and optimizers would step it "
            f"{len(stages)} times with one gradient: make one optimizer for all stages of the rank, with "
            "each parameter once: list(dict.fromkeys(p for stage in stages for p in "
            "stage.module.parameters()))"
        )
