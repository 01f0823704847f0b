"""The part of a pass before its stage: functions of torch are not called, recorded answers are returned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from partita._torch.fake.ghosts import become
from partita.errors import ExecutionError
from partita.pipelining.blocks.current_pass import current_pass
from partita.pipelining.blocks.cut import Site
from partita.pipelining.blocks.replaying.answers import (
    Answer,
    AutogradNode,
    HookHandle,
    NewTensor,
    NumberedTensor,
    RaisedError,
    StageDevice,
    map_leaves,
)
from partita.pipelining.blocks.replaying.calls_digest import CallsOfPass
from partita.pipelining.blocks.replaying.numbered_tensors import NumberedTensors

__all__ = ["NOT_RUN_HERE", "Replay"]

NOT_RUN_HERE: Site = ("not run here",)


class Replay:
    """Answers the calls before a stage, in order. New tensors are ghosts.

    Args:
        answers: what earlier stages have recorded. It may grow once all of them are read.
        tensors: of the pass; those that a call returns are added.
        device: of the stage.
    """

    def __init__(
        self, stage: int, answers: Sequence[Answer], tensors: NumberedTensors, device: torch.device
    ) -> None:
        self._stage = stage
        self._answers = answers
        self._tensors = tensors
        self._device = device
        self._next = 0
        self._over = False

    def answer(self, name: str) -> Any:
        """Return, or raise, what the next call did where it ran.

        Raises:
            ExecutionError: the next call is not one of ``name``.
        """
        if self._next >= len(self._answers):
            raise self._other_way(f"calls {name}", "the stage's beginning")
        called, answer, changes = self._answers[self._next]
        if called != name:
            raise self._other_way(f"calls {name}", called)
        self._next += 1
        for number, looks in changes.items() if changes else ():
            tensor = self._tensors[number]
            if tensor is not None and number in self._tensors.ghosts:
                become(tensor, looks.ghost())
        if isinstance(answer, RaisedError):
            raise answer.error
        if isinstance(answer, (NewTensor, NumberedTensor)):
            return self._leaf(answer)
        return map_leaves(self._leaf, answer)

    @property
    def is_over(self) -> bool:
        """Whether the stage has begun."""
        return self._over

    def check_complete(self) -> None:
        """Raise ExecutionError where the stage begins before all recorded calls have come."""
        if self._next != len(self._answers):
            raise self._other_way("reaches this stage", self._answers[self._next][0])
        self._over = True

    def check_equal(self, here: CallsOfPass, there: CallsOfPass) -> None:
        """Raise ExecutionError where the calls were others than where they ran, though of equal names."""
        if not here.are_equal(there):
            raise ExecutionError(
                f"the model's forward goes another way on stage {self._stage} than on those before it: it "
                "makes calls of the same functions with other tensors, or in another order. Where it goes "
                "through a set of strings, start all processes with PYTHONHASHSEED=0, since their order is "
                "another one in each; else see that what it reads before a cut is equal on all stages"
            )

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, NewTensor):
            ghost = leaf.ghost()
            self._tensors.add(ghost, NOT_RUN_HERE, ghost=True)
            return ghost
        if isinstance(leaf, NumberedTensor):
            tensor = self._tensors[leaf.number]
            if tensor is None:
                raise self._other_way("holds", f"value {leaf.number}, which this one has let go of")
            return tensor
        if isinstance(leaf, AutogradNode):
            return _ReplayedNode(leaf.what, self)
        if isinstance(leaf, HookHandle):
            return _ReplayedHandle(leaf.what)
        # a new object each time, as torch gives it: pickled values tell the two apart
        return torch.device(str(self._device)) if isinstance(leaf, StageDevice) else leaf

    def _other_way(self, here: str, there: str) -> ExecutionError:
        return ExecutionError(
            f"the model's forward goes another way on stage {self._stage} than on those before it: it {here} "
            f"where they had {there}. What it decides by must be its arguments, values of tensors, or what "
            "it keeps alike on all stages: see that no attribute that it reads before a cut is changed "
            "after one, and that hooks and settings are those of stage.module on every rank"
        )


class _ReplayedHandle(HookHandle):
    """The handle of a hook that an earlier stage has set. What the code of earlier stages removes, and what
    is removed after the pass (by a mode around the step), is removed there too.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        stage_pass = current_pass()
        if name == "remove" and (stage_pass is None or not stage_pass.is_in_stage):
            return lambda: None
        return super().__getattr__(name)


class _ReplayedNode(AutogradNode):
    """The ``grad_fn`` of a tensor of an earlier stage. The hooks that it gets before this stage begins, such
    as those of a module with backward hooks, are on the real one as well: here nothing calls them.
    """

    __slots__ = ("_replay",)

    def __init__(self, what: str, replay: Replay) -> None:
        super().__init__(what)
        self._replay = replay

    def __getattr__(self, name: str) -> Any:
        if name in {"register_hook", "register_prehook"} and not self._replay.is_over:
            return lambda _hook: RemovableHandle(OrderedDict())
        return super().__getattr__(name)
