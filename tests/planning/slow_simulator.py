"""A step, played through moment by moment: slow, and nothing in common with the simulator that it checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from partita.planning import Action, ActionKind, Cluster, Schedule, StageCost

F, W, BACK = ActionKind.F, ActionKind.W, (ActionKind.B, ActionKind.I)


@dataclass
class Message:
    kind: ActionKind
    sender: int
    receiver: int
    microbatch: int
    links: tuple[object, ...]
    seconds: float
    start: float | None = None

    @property
    def end(self) -> float | None:
        return None if self.start is None else self.start + self.seconds


@dataclass
class Rank:
    row: list[Action]
    speed: float
    at: int = 0
    running: tuple[Action, float, float] | None = None
    lane: list[tuple[Action, float]] = field(default_factory=list)


class SlowSimulator:
    """Everything that happened is in `passes`, `messages` and `collectives` when `run` is over."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster,
        edges: Sequence[tuple[int, int]],
    ) -> None:
        self.schedule, self.costs, self.cluster = schedule, costs, cluster
        self.edges = sorted(edges)  # of the messages of one pass, that to the nearest stage goes first
        self.tied = {
            (to, sender): size
            for sender, cost in enumerate(costs)
            for to, size in cost.tied_gradients
            if not schedule.is_lowered or (to, sender) in self.edges
        }
        self.back = sorted({*self.edges, *self.tied}, reverse=True)
        self.ranks = [
            Rank(list(schedule.actions(rank)), cluster.speed(rank)) for rank in range(schedule.ranks)
        ]
        self.passes: list[tuple[int, Action, float, float]] = []
        self.collectives: list[tuple[int, Action, float, float]] = []
        self.messages: list[Message] = []
        self.queues: dict[object, list[Message]] = {}
        self.done: dict[tuple[str, int, int], float] = {}

    def run(self) -> float:
        now, end = 0.0, 0.0
        for _ in range(100_000):
            for rank in range(len(self.ranks)):
                self.finish_pass(rank, now)
                self.go_on(rank, now)
            while self.start_messages(now):  # one that takes no time lets a rank or a message go on at once
                for rank in range(len(self.ranks)):
                    self.go_on(rank, now)
            times = [rank.running[2] for rank in self.ranks if rank.running]
            times += [message.end for message in self.messages if message.end is not None]
            times += [end for _, _, _, end in self.collectives]
            later = [time for time in times if time > now]
            end = max([end, *(span[3] for span in self.passes), *(span[3] for span in self.collectives)])
            if not later:
                assert all(rank.at == len(rank.row) for rank in self.ranks), "it stalls"
                return end
            now = min(later)
        raise AssertionError("it never ends")

    def finish_pass(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        if rank.running is None or rank.running[2] > now:
            return
        action, start, end = rank.running
        rank.running = None
        self.passes.append((number, action, start, end))
        for part in action.passes:
            what = "F" if part.kind is F else "W" if part.kind is W else "G"
            self.done[what, part.stage, part.microbatch] = end
            if self.schedule.is_lowered or part.kind is W:
                continue
            for producer, consumer in self.edges if part.kind is F else self.back:
                if part.kind is F and producer == part.stage:
                    self.send(ActionKind.SEND_F, part.stage, consumer, part.microbatch)
                elif part.kind in BACK and consumer == part.stage:
                    self.send(ActionKind.SEND_B, part.stage, producer, part.microbatch)

    def send(self, kind: ActionKind, sender: int, receiver: int, microbatch: int) -> None:
        here, there = self.schedule.stage_ranks[sender], self.schedule.stage_ranks[receiver]
        if here == there:
            return
        cost, other = self.costs[sender], self.costs[receiver]
        if kind is ActionKind.SEND_F:
            size = cost.send_bytes
        else:
            crosses = (receiver, sender) in self.edges
            size = self.tied.get((receiver, sender), 0) + (cost.gradient_bytes(other) if crosses else 0)
        links = self.cluster.links(here, there)
        seconds = self.cluster.transfer_s(size, here, there)
        message = Message(kind, sender, receiver, microbatch, links, seconds)
        self.messages.append(message)
        for link in links:
            self.queues.setdefault(link, []).append(message)

    def start_messages(self, now: float) -> bool:
        """Whether any message started."""
        started = False
        for queue in self.queues.values():
            while queue and queue[0].end is not None and queue[0].end <= now:
                queue.pop(0)
        for message in self.messages:
            if message.start is None and all(self.queues[link][0] is message for link in message.links):
                message.start, started = now, True
        return started

    def go_on(self, number: int, now: float) -> None:
        """Do what takes no time, and begin a pass."""
        rank = self.ranks[number]
        while rank.running is None and rank.at < len(rank.row):
            action = rank.row[rank.at]
            if action.is_send:
                self.send(action.kind, action.stage, action.other_stage, action.microbatch or 0)
            elif action.kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
                cost = self.costs[action.stage]
                seconds = cost.unshard_s if action.kind is ActionKind.UNSHARD else cost.reduce_grad_s
                if seconds:
                    start = max([now, *(end for _, end in rank.lane)])
                    rank.lane.append((action, start + seconds))
                    self.collectives.append((number, action, start, start + seconds))
            elif action.is_compute:
                if not self.has_all(number, action, now):
                    return
                rank.running = (action, now, now + self.seconds(action) / rank.speed)
            rank.at += 1

    def seconds(self, action: Action) -> float:
        if action.parts:
            for part in action.parts:
                together = self.costs[part.stage].overlap_s
                if part.kind is F:
                    return sum(map(self.seconds, action.parts)) if together is None else together
            return sum(map(self.seconds, action.parts))
        cost = self.costs[action.stage]
        again, half = cost.recompute_s, cost.backward_s / 2
        if action.kind is F:
            return cost.forward_s
        if action.kind is ActionKind.B:
            return cost.backward_s + again
        if action.kind is ActionKind.I:
            return (half if cost.backward_input_s is None else cost.backward_input_s) + again
        return half if cost.backward_weight_s is None else cost.backward_weight_s

    def has_all(self, number: int, action: Action, now: float) -> bool:
        for part in action.passes:
            stage, microbatch = part.stage, part.microbatch
            gathers = [end for one, end in self.ranks[number].lane if str(one) == f"{stage}UNSHARD"]
            if any(end > now for end in gathers):
                return False
            if part.kind is W and ("G", stage, microbatch) not in self.done:
                return False
            if part.kind in BACK and ("F", stage, microbatch) not in self.done:
                return False
            for producer, consumer in self.edges if part.kind is F else self.back:
                if part.kind is F and consumer == stage and not self.has("F", producer, stage, part, now):
                    return False
                if part.kind in BACK and producer == stage and not self.has("G", consumer, stage, part, now):
                    return False
        return True

    def has(self, what: str, source: int, target: int, part: Action, now: float) -> bool:
        if self.schedule.stage_ranks[source] == self.schedule.stage_ranks[target]:
            return (what, source, part.microbatch) in self.done
        kind = ActionKind.SEND_F if what == "F" else ActionKind.SEND_B
        return any(
            (message.kind, message.sender, message.receiver, message.microbatch)
            == (kind, source, target, part.microbatch)
            and message.end is not None
            and message.end <= now
            for message in self.messages
        )
