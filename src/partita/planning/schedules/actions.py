"""The actions that a schedule is made of, and the text that stands for each.

The text is the one that torch's pipelining writes into its CSV files: ``2F0`` is the forward pass of stage 2
on microbatch 0, ``0SEND_F1`` sends what stage 0 made of microbatch 1, ``1UNSHARD`` concerns the whole stage,
and ``(0F1;1B0)OVERLAP_F_B`` runs two passes together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from partita.errors import ScheduleError

__all__ = ["PASS_KINDS", "PASS_NUMBERS", "Action", "ActionKind", "overlap"]


class ActionKind(StrEnum):
    """What an action does."""

    __hash__ = str.__hash__  # the same number as Enum's own, which is made in Python at each look-up

    F = "F"
    """forward pass"""
    I = "I"  # noqa: E741 - the letter that the zero-bubble papers and the files use
    """gradient of the inputs"""
    W = "W"
    """gradient of the weights"""
    B = "B"
    """whole backward pass: inputs and weights"""
    OVERLAP_F_B = "OVERLAP_F_B"
    """run the parts together"""
    SEND_F = "SEND_F"
    """send the stage's output to a later stage"""
    SEND_B = "SEND_B"
    """send the gradient of an input back to the stage that it came from"""
    RECV_F = "RECV_F"
    """receive an input of the stage from an earlier stage"""
    RECV_B = "RECV_B"
    """receive the gradient of the stage's output"""
    UNSHARD = "UNSHARD"
    """gather the stage's parameters"""
    RESHARD = "RESHARD"
    """free what UNSHARD gathered"""
    REDUCE_GRAD = "REDUCE_GRAD"
    """sum the stage's gradients over its replicas"""

    # Other names of the passes, as ``torch.distributed.pipelining`` calls them.
    FORWARD = F
    BACKWARD_INPUT = I
    BACKWARD_WEIGHT = W
    FULL_BACKWARD = B


PASS_KINDS = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)
"""The passes, by the numbers that a search counts them by."""
PASS_NUMBERS = {kind: number for number, kind in enumerate(PASS_KINDS)}
"""These numbers."""
_COMPUTE = frozenset(PASS_KINDS)
_SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
_RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
_WHOLE_STAGE = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})
_TO_NEXT = frozenset({ActionKind.SEND_F, ActionKind.RECV_B})

_WORDS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward of inputs",
    ActionKind.W: "backward of weights",
    ActionKind.SEND_F: "sends activations to",
    ActionKind.RECV_F: "receives activations from",
    ActionKind.SEND_B: "sends gradients to",
    ActionKind.RECV_B: "receives gradients from",
    ActionKind.UNSHARD: "gathers parameters",
    ActionKind.RESHARD: "frees gathered parameters",
    ActionKind.REDUCE_GRAD: "sums gradients over replicas",
}

# Longest first, so that `0SEND_B1` is not read as something that starts with S.
_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_ONE_ACTION = re.compile(rf"(\d+)({_KINDS})(\d+)?(?:>(\d+))?")
_DIGITS = 9  # no pipeline has more stages or microbatches than that, and a list of so many would not fit
_TOGETHER = re.compile(r"\(([^()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    Attributes:
        stage: the stage that it concerns; -1 for OVERLAP_F_B, whose parts have their own.
        kind: what is done.
        microbatch: which one; None where the action concerns the whole stage.
        parts: the compute actions of an OVERLAP_F_B, at least two.
        peer: for a send or a receive, the stage at the other end; None where that is the neighbour, as in
            torch's files.

    Raises:
        ScheduleError: a field that the kind does not have, or misses.

    >>> str(Action(2, ActionKind.F, 0))
    '2F0'
    >>> Action.parse("0SEND_F1>3").other_stage
    3
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.kind is ActionKind.OVERLAP_F_B:
            self._check_parts()
            return
        if self.parts:
            raise ScheduleError(f"{self.kind} at stage {self.stage} has parts: only OVERLAP_F_B has")
        if self.stage < 0:
            raise ScheduleError(f"{self.kind} has stage {self.stage}: stages count from 0")
        if self.kind in _WHOLE_STAGE:
            if self.microbatch is not None:
                raise ScheduleError(
                    f"{self.kind} at stage {self.stage} names microbatch {self.microbatch}: leave it out"
                )
        elif self.microbatch is None or self.microbatch < 0:
            raise ScheduleError(
                f"{self.kind} at stage {self.stage} has microbatch {self.microbatch}: give one, from 0"
            )
        if self.peer is not None and not self.is_communication:
            raise ScheduleError(f"{self.kind} at stage {self.stage} has a peer: only sends and receives have")

    def _check_parts(self) -> None:
        if self.stage != -1 or self.microbatch is not None or self.peer is not None:
            raise ScheduleError(
                "OVERLAP_F_B has a stage, a microbatch or a peer: its parts have; make it with overlap()"
            )
        if len(self.parts) < 2 or not all(part.kind in _COMPUTE for part in self.parts):
            raise ScheduleError(
                f"OVERLAP_F_B has parts ({_join(self.parts)}): give two or more of F, I, W, B"
            )

    @property
    def stage_index(self) -> int:
        """Another name of `stage`, as ``torch.distributed.pipelining`` calls it."""
        return self.stage

    @property
    def computation_type(self) -> ActionKind:
        """Another name of `kind`, likewise."""
        return self.kind

    @property
    def microbatch_index(self) -> int | None:
        """Another name of `microbatch`, likewise."""
        return self.microbatch

    @property
    def sub_actions(self) -> tuple[Action, ...] | None:
        """Another name of `parts`, likewise; None where there are none."""
        return self.parts or None

    @property
    def is_compute_op(self) -> bool:
        """Another name of `is_compute`, likewise."""
        return self.is_compute

    @property
    def is_compute(self) -> bool:
        """Whether it computes: F, I, W, B or several of them together."""
        return self.kind in _COMPUTE or self.kind is ActionKind.OVERLAP_F_B

    @property
    def is_whole_stage(self) -> bool:
        """Whether it concerns a stage and no microbatch: UNSHARD, RESHARD, REDUCE_GRAD."""
        return self.kind in _WHOLE_STAGE

    @property
    def is_send(self) -> bool:
        """Whether it sends to another stage."""
        return self.kind in _SENDS

    @property
    def is_receive(self) -> bool:
        """Whether it receives from another stage."""
        return self.kind in _RECEIVES

    @property
    def is_communication(self) -> bool:
        """Whether it sends or receives."""
        return self.kind in _SENDS or self.kind in _RECEIVES

    @property
    def passes(self) -> tuple[Action, ...]:
        """The compute actions in it: itself, its parts, or none."""
        if self.parts:
            return self.parts
        return (self,) if self.kind in _COMPUTE else ()

    @property
    def other_stage(self) -> int:
        """For a send or a receive, the stage at the other end (ScheduleError for other kinds)."""
        if self.peer is not None:
            return self.peer
        if not self.is_communication:
            raise ScheduleError(f"{self} has no other stage: only sends and receives have")
        return self.stage + 1 if self.kind in _TO_NEXT else self.stage - 1

    @property
    def words(self) -> str:
        """What it does, for people who read a trace or a profile.

        >>> Action(1, ActionKind.F, 3).words
        'stage 1 forward, microbatch 3'
        >>> Action.parse("0SEND_F1>3").words
        'stage 0 sends activations to stage 3, microbatch 1'
        """
        if self.parts:
            return " and ".join(part.words for part in self.parts)
        other = f" stage {self.other_stage}" if self.is_communication else ""
        microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        return f"stage {self.stage} {_WORDS[self.kind]}{other}{microbatch}"

    def __str__(self) -> str:
        if self.parts:
            return f"({_join(self.parts)}){self.kind}"
        microbatch = "" if self.microbatch is None else self.microbatch
        peer = "" if self.peer is None else f">{self.peer}"
        return f"{self.stage}{self.kind}{microbatch}{peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` stands for; ScheduleError, with the text in it, where it stands for none."""
        text = text.strip()
        together = _TOGETHER.fullmatch(text)
        if together:
            return overlap(*(cls.parse(part) for part in together[1].split(";")))
        match = _ONE_ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r:.60} is not an action: write it like 2F0, 0SEND_F1, 1UNSHARD or "
                "(0F1;1B0)OVERLAP_F_B"
            )
        if any(number is not None and len(number) > _DIGITS for number in match.group(1, 3, 4)):
            raise ScheduleError(f"{text!r:.60} has a number of more than {_DIGITS} digits: count from 0")
        stage, kind, microbatch, peer = match.groups()
        return cls(
            int(stage),
            ActionKind(kind),
            None if microbatch is None else int(microbatch),
            peer=None if peer is None else int(peer),
        )

    @classmethod
    def from_str(cls, text: str) -> Action | None:
        """`parse`, as ``torch.distributed.pipelining`` calls it; None for an empty cell."""
        return cls.parse(text) if text.strip() else None


def overlap(*parts: Action) -> Action:
    """The action that runs `parts` (F, I, W or B, none of which needs another) together."""
    return Action(-1, ActionKind.OVERLAP_F_B, None, tuple(parts))


def _join(parts: tuple[Action, ...]) -> str:
    return ";".join(map(str, parts))
