"""What was done to a model after the cut, where its stages go on as they were cut."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.fx import Graph, GraphModule

from partita.errors import ExecutionError
from partita.pipelining.stages.graph_stage import GraphStage
from partita.pipelining.stages.original_model import is_same_setting
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.preparing.arguments import StepArguments
from partita.pipelining.steps.preparing.preparation import Accepted, PreparedStep, StepPreparation

__all__ = ["ChangedSettings"]

_OF_GRAPHS = frozenset(vars(GraphModule(nn.Module(), Graph())))
"""Attributes that the module of a captured stage has of itself: ``meta``, ``shape_env``."""


@dataclass(frozen=True, slots=True)
class _Own:
    """A stage of this rank, with the modules in it by path."""

    stage: Stage
    modules: Mapping[str, nn.Module]

    @property
    def is_captured(self) -> bool:
        return isinstance(self.stage, GraphStage)


class ChangedSettings:
    """A `StepPreparation` that also looks at the model that was cut and at the parts of its captured stages:
    at ``drop.p``, a temperature, ``model.eval()``, a layer that was replaced.

    Args:
        preparation: what else prepares a step.
        stages: those of this rank.
    """

    def __init__(self, preparation: StepPreparation, stages: Iterable[Stage]) -> None:
        self._preparation = preparation
        self._own = [_Own(stage, dict(stage.unwrapped.named_modules())) for stage in stages]
        self._is_over = False

    def accept(self, arguments: StepArguments) -> Accepted:
        """See `StepPreparation`. Warn, once, of what was changed in the model and not in this rank's stages.

        Raises:
            ExecutionError: it was changed in a part of a captured stage, where nothing reads it.
        """
        self._check()
        return self._preparation.accept(arguments)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`."""
        return self._preparation.prepare(accepted)

    def _check(self) -> None:
        for own in self._own:
            if own.is_captured:
                _refuse_unread(own)
        if self._is_over:
            return
        first = self._own[0]  # all are of one model
        text = _changed(first) or _replaced(first) or next(filter(None, map(_switched, self._own)), "")
        if text:
            self._is_over = True
            warnings.warn(text, UserWarning, stacklevel=7)


def _refuse_unread(own: _Own) -> None:
    settings = (it for it in own.stage.original.set_on(own.modules) if it.name not in _OF_GRAPHS)
    setting = next(settings, None)
    if setting is not None:
        raise ExecutionError(
            f"{setting} of stage {own.stage.index} was set to {setting.now!r} after the cut, which would "
            f"change nothing: a captured stage has {setting.before!r} as a constant. Set it in the model, "
            'before pipeline(), or cut with frontend="modules", whose stages run the model\'s own code'
        )


def _changed(own: _Own) -> str:
    for setting in own.stage.original.changed():
        if not own.is_captured:
            here = getattr(own.modules.get(setting.path), setting.name, None)
            if is_same_setting(here, setting.now) or not is_same_setting(here, setting.before):
                continue  # set there too, or by the model's own code as it runs
        cure = "set it on stage.module of each rank"
        if own.is_captured:
            cure = (
                f'cut the model again, or with frontend="modules", and {cure}: captured stages have constants'
            )
        return (
            f"{setting} of the model was {setting.before!r} when it was cut, and is {setting.now!r} now: its "
            f"stages still run with {setting.before!r}. To change that, {cure}"
        )
    return ""


def _switched(own: _Own) -> str:
    for path, training in own.stage.original.switched():
        part = own.modules.get(path)
        if part is not None and part.training is not training:
            mode, here = "train" if training else "eval", f"{path}." if path else ""
            return (
                f"{path or 'the model'} was put into {mode} mode after the cut, and stage {own.stage.index}, "
                f"which is what runs, was not: call stage.module.{here}{mode}() on each rank"
            )
    return ""


def _replaced(own: _Own) -> str:
    path, module = next(own.stage.original.replaced(), ("", None))
    if module is None:
        return ""
    return (
        f"{path} of the model was replaced by a {type(module).__name__} after the cut, and its stages still "
        "run what was there before: replace it before pipeline(), or cut the model again"
    )
