"""A schedule with its costs and links as plain tuples of numbers, which the clock goes through.

A value has a number: its kind's and stage's first number plus the microbatch. So every pass of a stage is the
same tuple with another microbatch, and what is there already is a list of times.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partita.errors import ScheduleError
from partita.listing import first_few
from partita.planning.costs.sent_along import sent_along
from partita.planning.costs.stage_cost import StageCost
from partita.planning.hardware.cluster import Cluster
from partita.planning.schedules._program import PassKeys, message_of, pass_keys
from partita.planning.schedules.actions import PASS_KINDS, Action, ActionKind
from partita.planning.schedules.edges import EdgeTable, edge_table
from partita.planning.schedules.schedule import Schedule

__all__ = ["COLLECTIVE", "COMPUTE", "SEND", "StepProgram", "TimedAction", "TimedEdge", "step_program"]

COMPUTE, SEND, COLLECTIVE = range(3)
_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)


class TimedAction(NamedTuple):
    """What an action does; the microbatch is added to each number of a value.

    Attributes:
        role: COMPUTE, SEND (in a schedule that has sends of its own) or COLLECTIVE.
        seconds: on its own rank.
        needs: values that it waits for.
        gives: values that are there when it ends.
        sends: values that it sends, each with the number of its edge.
    """

    role: int
    seconds: float
    needs: tuple[int, ...]
    gives: tuple[int, ...]
    sends: tuple[tuple[int, int], ...]


class TimedEdge(NamedTuple):
    """What the messages from one stage to another have in common.

    Attributes:
        what: ``"F>"`` or ``"G>"``.
        sender: the stage that sends.
        receiver: the stage that receives.
        first: the number of its message of microbatch 0.
        seconds: of each message.
        links: numbers of the links that each message occupies.
        handling_s: for which the sender and the receiver each work for a message.
    """

    what: str
    sender: int
    receiver: int
    first: int
    seconds: float
    links: tuple[int, ...]
    handling_s: float


@dataclass(frozen=True)
class StepProgram:
    """What every rank does.

    Attributes:
        rows: for each rank, its operations, each with its microbatch.
        actions: for each rank, the action of each operation.
        edges: every kind of message.
        links: how many links there are.
        values: how many values there are.
        in_time_order: whether messages of several ranks compete for a link, so that it matters which comes
            first.
    """

    rows: tuple[list[tuple[TimedAction, int]], ...]
    actions: tuple[list[Action], ...]
    edges: tuple[TimedEdge, ...]
    links: int
    values: int
    in_time_order: bool


def step_program(
    schedule: Schedule,
    costs: Sequence[StageCost],
    cluster: Cluster,
    edges: Iterable[tuple[int, int]] | None = None,
) -> StepProgram:
    """Return the step as the clock runs it: for each action its seconds, what it waits for and what it sends;
    for each message its seconds and its links.
    """
    return _Writer(schedule, costs, cluster, edges).write()


class _Writer:
    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster,
        edges: Iterable[tuple[int, int]] | None,
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._cluster = cluster
        self._sent = sent_along(costs)
        if edges is None and not schedule.is_lowered:
            forward, back = ({*pairs} for pairs in self._sent)
        else:
            forward = {*_pairs(edge_table(schedule.stages, edges))}
            back = {(after, before) for before, after in forward}
        tied = self._tied_bytes(forward)
        table = edge_table(schedule.stages, forward)
        gradients = edge_table(schedule.stages, {(to, sender) for sender, to in back} | {*tied})
        self._keys = pass_keys(schedule, table, gradients)
        self._values = 2 * schedule.stages * schedule.microbatches
        self._edges = self._number_edges(_pairs(table), _pairs(gradients), back, tied)
        self._handled_s = {what: [0.0] * schedule.stages for what in ("F>", "G>")}
        for _, edge in self._edges.values():
            for stage in (edge.sender, edge.receiver):
                self._handled_s[edge.what][stage] += edge.handling_s
        self._passes = {
            kind: [self._pass(kind, stage) for stage in range(schedule.stages)] for kind in PASS_KINDS
        }

    def write(self) -> StepProgram:
        written = [self._row(rank, row) for rank, row in enumerate(self._schedule.rows)]
        edges = [edge for _, edge in self._edges.values()]
        senders = {(link, self._schedule.stage_ranks[edge.sender]) for edge in edges for link in edge.links}
        links = {link for link, _ in senders}
        return StepProgram(
            rows=tuple(row for row, _ in written),
            actions=tuple(actions for _, actions in written),
            edges=tuple(edges),
            links=max(links, default=-1) + 1,
            values=self._values,
            in_time_order=len(senders) > len(links) or any(len(edge.links) > 1 for edge in edges),
        )

    def _row(
        self, rank: int, row: Iterable[Action | None]
    ) -> tuple[list[tuple[TimedAction, int]], list[Action]]:
        operations: list[tuple[TimedAction, int]] = []
        actions: list[Action] = []
        gathered: dict[int, int] = {}
        for action in row:
            if action is None or action.kind in _RECEIVES:
                continue
            of_stage = self._passes.get(action.kind)
            if of_stage is not None and not gathered:
                self._require_place(action, rank)
                operations.append((of_stage[action.stage], action.microbatch or 0))
            else:
                operation = self._other(action, rank, gathered)
                if operation is None:
                    continue
                operations.append((operation, 0))
            actions.append(action)
        return operations, actions

    def _require_place(self, action: Action, rank: int) -> None:
        schedule = self._schedule
        if action.stage >= schedule.stages or schedule.stage_ranks[action.stage] != rank:
            raise ScheduleError(
                f"rank {rank} has {action}, whose stage it has not: stages are on the ranks "
                f"{first_few(map(str, schedule.stage_ranks))}"
            )
        if (action.microbatch or 0) >= schedule.microbatches:
            raise ScheduleError(
                f"rank {rank} has {action}: microbatches are 0 to {schedule.microbatches - 1}"
            )

    def _other(self, action: Action, rank: int, gathered: dict[int, int]) -> TimedAction | None:
        """What is no single pass, or a pass that may have to wait until its parameters are gathered.

        Args:
            gathered: the stages whose next pass does, with the value that it waits for; changed.
        """
        for part in action.passes or (action,):
            self._require_place(part, rank)
        if action.is_communication:
            what, sender, receiver, microbatch = message_of(action)
            if (what, sender, receiver) not in self._edges:
                raise ScheduleError(
                    f"rank {rank} has {action}, and no edge goes to stage {receiver} from there"
                )
            number, edge = self._edges[what, sender, receiver]
            local = self._number((what[0], sender, sender)) + microbatch
            return TimedAction(SEND, 0.0, (local,), (), ((edge.first + microbatch, number),))
        if action.is_whole_stage:
            return self._collective(action, gathered)
        parts = [
            (self._passes[part.kind][part.stage], part.microbatch or 0, part.stage) for part in action.passes
        ]
        waits = [gathered.pop(stage) for _, _, stage in parts if stage in gathered]
        return TimedAction(
            COMPUTE,
            self._together_s(action),
            (*waits, *(need + microbatch for one, microbatch, _ in parts for need in one.needs)),
            tuple(give + microbatch for one, microbatch, _ in parts for give in one.gives),
            tuple((first + mb, edge) for one, mb, _ in parts for first, edge in one.sends),
        )

    def _collective(self, action: Action, gathered: dict[int, int]) -> TimedAction | None:
        cost = self._costs[action.stage]
        if action.kind is ActionKind.REDUCE_GRAD and cost.reduce_grad_s:
            return TimedAction(COLLECTIVE, cost.reduce_grad_s, (), (), ())
        if action.kind is ActionKind.UNSHARD and cost.unshard_s:
            gathered[action.stage] = self._values
            self._values += 1
            return TimedAction(COLLECTIVE, cost.unshard_s, (), (gathered[action.stage],), ())
        return None

    def _together_s(self, action: Action) -> float:
        if not action.parts:
            return self._passes[action.kind][action.stage].seconds
        forward = next((part.stage for part in action.parts if part.kind is ActionKind.F), None)
        together_s = None if forward is None else self._costs[forward].overlap_s
        if together_s is None or forward is None:
            return sum(self._passes[part.kind][part.stage].seconds for part in action.parts)
        handling_s = sum(self._handling_s(part.kind, part.stage) for part in action.parts)
        return together_s / self._cluster.speed(self._schedule.stage_ranks[forward]) + handling_s

    def _pass(self, kind: ActionKind, stage: int) -> TimedAction:
        keys: PassKeys = self._keys(kind, stage)
        speed = self._cluster.speed(self._schedule.stage_ranks[stage])
        sends = [self._edges[key] for key in keys.sends]
        return TimedAction(
            COMPUTE,
            self._costs[stage].seconds(kind) / speed + self._handling_s(kind, stage),
            tuple(map(self._number, keys.needs)),
            tuple(map(self._number, keys.gives)),
            tuple((edge.first, number) for number, edge in sends),
        )

    def _handling_s(self, kind: ActionKind, stage: int) -> float:
        """For how long a rank works for the messages that a pass takes and makes."""
        if kind is ActionKind.W:
            return 0.0
        return self._handled_s["F>" if kind is ActionKind.F else "G>"][stage]

    def _number(self, key: tuple[str, int, int]) -> int:
        """Of the value of microbatch 0."""
        what, stage, _ = key
        if what in ("F>", "G>"):
            return self._edges[key][1].first
        return (stage + (self._schedule.stages if what == "G" else 0)) * self._schedule.microbatches

    def _tied_bytes(self, forward: Collection[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """The bytes of tied parameters' gradients by edge, the stage that sends them last. In a schedule with
        sends written out, what has none does not travel.
        """
        every = not self._schedule.is_lowered
        return {
            (to, sender): size
            for sender, cost in enumerate(self._costs)
            for to, size in cost.tied_gradients
            if every or (to, sender) in forward
        }

    def _number_edges(
        self,
        forward: Sequence[tuple[int, int]],
        back: Sequence[tuple[int, int]],
        untied: Collection[tuple[int, int]],
        tied: Mapping[tuple[int, int], int],
    ) -> dict[tuple[str, int, int], tuple[int, TimedEdge]]:
        """Every message's kind with its number, its edge and the links that it competes for.

        Args:
            forward: pairs (producer stage, consumer stage) that values go along.
            back: those that gradients go back along.
            untied: of these, as (sender, receiver), those along which gradients of values go.
            tied: the bytes of tied parameters' gradients.
        """
        ranks = self._schedule.stage_ranks
        keys = [("F>", before, after) for before, after in forward if ranks[before] != ranks[after]]
        keys += [("G>", after, before) for before, after in back if ranks[before] != ranks[after]]
        keys.sort(key=lambda key: (min(key[1:]), max(key[1:]), key[0]))
        names = _needed_links([self._cluster.links(ranks[sender], ranks[to]) for _, sender, to in keys])
        links = {name: number for number, name in enumerate(dict.fromkeys(n for one in names for n in one))}
        edges = {}
        for number, (key, own) in enumerate(zip(keys, names, strict=True)):
            what, sender, receiver = key
            if what == "F>":
                size = self._value_bytes(sender, receiver)
            else:
                size = tied.get((receiver, sender), 0)
                if (sender, receiver) in untied:
                    size += self._gradient_bytes(sender, receiver)
            ends = (ranks[sender], ranks[receiver])
            seconds, handling_s = self._cluster.transfer_s(size, *ends), self._cluster.handling_s(size, *ends)
            edge = TimedEdge(*key, self._values, seconds, tuple(links[name] for name in own), handling_s)
            edges[key] = number, edge
            self._values += self._schedule.microbatches
        return edges

    def _value_bytes(self, sender: int, receiver: int) -> int:
        cost = self._costs[sender]
        return cost.send_bytes if cost.sent_values is None else self._sent[0].get((sender, receiver), 0)

    def _gradient_bytes(self, sender: int, receiver: int) -> int:
        cost = self._costs[sender]
        if cost.sent_values is None:
            return cost.gradient_bytes(self._costs[receiver])
        return self._sent[1].get((sender, receiver), 0)


def _pairs(table: EdgeTable) -> list[tuple[int, int]]:
    return [(before, after) for before, all_after in enumerate(table.consumers) for after in all_after]


def _needed_links(names: Sequence[tuple[Hashable, ...]]) -> list[tuple[Hashable, ...]]:
    """The links of each edge without those that another one of its links keeps free: all their messages go
    through that one too, one at a time.
    """
    users: dict[Hashable, set[int]] = {}
    for number, own in enumerate(names):
        for name in own:
            users.setdefault(name, set()).add(number)
    needed = []
    for own in names:
        largest = sorted(dict.fromkeys(own), key=lambda name: -len(users[name]))
        kept: list[Hashable] = []
        for name in largest:
            if not any(users[name] <= users[other] for other in kept):
                kept.append(name)
        needed.append(tuple(kept))
    return needed
