"""Parameters that two stages of one rank share, and optimizers that would step them twice.

With an optimizer for each stage, as one makes them where ranks hold several, a tied weight is in two of them,
and both would take its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.pipelining.stages.stage import Stage

__all__ = ["SteppedOnce"]


_Use = tuple["weakref.ref[Tensor]", int, "weakref.ref[Optimizer]"]
"""The gradient, how often it had been written to, and the optimizer that took it."""


class SteppedOnce:
    """Refuses the second use of one gradient, as long as it lives.

    Args:
        stages: those of one rank.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        holders: dict[nn.Parameter, tuple[str, list[int]]] = {}
        for stage in stages:
            for name, parameter in stage.module.named_parameters():
                holders.setdefault(parameter, (name, []))[1].append(stage.index)
        self._shared = {parameter: held for parameter, held in holders.items() if len(held[1]) > 1}
        self._used: dict[nn.Parameter, _Use] = {}
        if self._shared:
            watch = weakref.WeakMethod(self._before_step)
            hook = register_optimizer_step_pre_hook(lambda *given: _call(watch, *given))
            weakref.finalize(self, hook.remove)

    def _before_step(self, optimizer: Optimizer) -> None:
        taken: dict[nn.Parameter, Tensor] = {}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter in self._shared and parameter.grad is not None:
                if parameter in taken or self._was_used(parameter, parameter.grad, optimizer):
                    self._refuse(parameter)
                taken[parameter] = parameter.grad
        for parameter, gradient in taken.items():
            self._used[parameter] = weakref.ref(gradient), times_written(gradient), weakref.ref(optimizer)

    def _was_used(self, parameter: nn.Parameter, gradient: Tensor, optimizer: Optimizer) -> bool:
        """Whether another optimizer has taken just this gradient."""
        if parameter not in self._used:
            return False
        used, writes, by = self._used[parameter]
        return used() is gradient and writes == times_written(gradient) and by() is not optimizer

    def _refuse(self, parameter: nn.Parameter) -> None:
        name, stages = self._shared[parameter]
        raise ExecutionError(
            f"{name!r} is one parameter of the stages {stages} of this rank, and optimizers would step it "
            f"{len(stages)} times with one gradient: make one optimizer for all stages of the rank, with "
            "each parameter once: list(dict.fromkeys(p for stage in stages for p in "
            "stage.module.parameters()))"
        )


def _call(watch: weakref.WeakMethod[Any], optimizer: Optimizer, *_given: Any) -> None:
    method = watch()
    if method is not None:
        method(optimizer)
