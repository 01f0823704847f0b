"""Where to cut a line of units: smallest bottleneck, then fewest bytes across, then most even stages.

All numbers are whole (times in femtoseconds), so that comparisons are exact and equal inputs give equal cuts.

The bottleneck comes first, by parametric search: for a bound T, `_fewest_after` finds in about linear time
how many stages are needed at least. The smallest T at which that is no more than the stages asked for is a
lower bound, and nearly always attained. Then two dynamic programs over (number of stages, border) choose
among the cuts within T:

    _even_cuts   exact in all three goals; looks at every pair of borders that a stage may lie between
    _lean_cuts   exact in the first two, as even as a greedy walk back gets; near linear in units x stages

The first is taken wherever its pairs are few, which they are when T leaves little slack.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from partita.planning.costs.units import TiedUnits

__all__ = ["CutProblem", "Cuts", "find_cuts"]

_MOST_PAIRS = 1_500_000

Cuts = tuple[int, ...]
"""The places of all borders used, ends included: stage k lies between ``cuts[k]`` and ``cuts[k + 1]``."""


@dataclass(frozen=True)
class CutProblem:
    """A line of `n` units with places 0 (before the first) to `n` (after the last) to cut at.

    Attributes:
        compute: for each place, the time of all units before it.
        leave: for each place, the time that a stage needs to send across it forward (0 at the ends).
        enter: for each place, the time that a stage needs to send across it backward (0 at the ends).
        hidden: whether sending goes on beside computing (a stage takes the largest of the three) or adds to
            it.
        crossing: for each place, the bytes across it (0 at the ends).
        places: the places that may be used, both ends included, in order.
        static: for each place, the bytes that all units before it always hold.
        activations: for each place, the bytes that all units before it keep for one microbatch.
        in_flight: for each stage, the most microbatches that it keeps.
        memory: for each stage, the most bytes that it may hold; None where there is no limit.
        entering: for each place, the bytes of what crosses it that a stage behind it keeps for one
            microbatch; none at all where it is empty.
        leaving: the same for a stage in front of it.
        tied: parameters that `static` counts for several units.
        tied_copies: what a byte of these takes there.
    """

    compute: tuple[int, ...]
    leave: tuple[int, ...]
    enter: tuple[int, ...]
    hidden: bool
    crossing: tuple[int, ...]
    places: tuple[int, ...]
    static: tuple[int, ...]
    activations: tuple[int, ...]
    in_flight: tuple[int, ...]
    memory: tuple[int, ...] | None
    entering: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    tied: tuple[TiedUnits, ...] = ()
    tied_copies: float = 1.0

    @property
    def stages(self) -> int:
        """How many stages are wanted."""
        return len(self.in_flight)

    def time(self, start: int, end: int) -> int:
        """The time of the stage between two places."""
        compute = self.compute[end] - self.compute[start]
        if self.hidden:
            return max(compute, self.enter[start], self.leave[end])
        return compute + self.enter[start] + self.leave[end]

    def bytes_held(self, stage: int, start: int, end: int) -> int:
        """The memory of stage number `stage`, were it the one between two places."""
        return self.least_held(stage, start, end) + self.in_flight[stage] * self._at_borders(start, end)

    def least_held(self, stage: int, start: int, end: int) -> int:
        """The same without what is kept of what crosses its borders: it grows with the stage."""
        kept = self.activations[end] - self.activations[start]
        return self.static_bytes(start, end) + self.in_flight[stage] * kept

    def static_bytes(self, start: int, end: int) -> int:
        """What the stage between two places always holds."""
        size = self.static[end] - self.static[start]
        for copy, users in self._copies:
            size -= copy * max(users[end] - users[start] - 1, 0)
        return size

    @cached_property
    def _copies(self) -> list[tuple[int, list[int]]]:
        """The bytes of each of `tied`, and for each place how many units before it use them."""
        return [
            (
                int(self.tied_copies * tied.parameter_bytes),
                [bisect_left(tied.units, place) for place in range(len(self.static))],
            )
            for tied in self.tied
        ]

    def _at_borders(self, start: int, end: int) -> int:
        return (self.entering[start] if self.entering else 0) + (self.leaving[end] if self.leaving else 0)

    def fits(self, stage: int, start: int, end: int) -> bool:
        """Whether stage number `stage` may lie between two places."""
        return self.memory is None or self.bytes_held(stage, start, end) <= self.memory[stage]

    def may_fit(self, stage: int, start: int, end: int) -> bool:
        """Whether it may, or may where it is longer: false for a stage that is too large in any case."""
        return self.memory is None or self.least_held(stage, start, end) <= self.memory[stage]

    def is_as_small(self, stage: int, start: int, other: int) -> bool:
        """Whether the stage that starts at `start` holds no more than the one that starts at `other`."""
        if self.memory is None or not self.entering:
            return True
        more = self.in_flight[stage] * (self.entering[start] - self.entering[other])
        return more <= self.least_held(stage, other, start)

    # A stage from i to j, both usable at T, is within T if and only if ends[j] - starts[i] <= T.
    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (
            self.compute
            if self.hidden
            else tuple(c - e for c, e in zip(self.compute, self.enter, strict=True))
        )

    @cached_property
    def ends(self) -> tuple[int, ...]:
        return (
            self.compute
            if self.hidden
            else tuple(c + s for c, s in zip(self.compute, self.leave, strict=True))
        )

    def usable(self, bound: int) -> tuple[int, ...]:
        """The places that a cut with this bottleneck may use."""
        if not self.hidden:
            return self.places
        return tuple(place for place in self.places if max(self.enter[place], self.leave[place]) <= bound)


def find_cuts(problem: CutProblem) -> Cuts | None:
    """The best cuts, or None where no cut into so many stages fits the memory (or the places)."""
    low = -1
    high = problem.compute[-1] + max(problem.leave) + max(problem.enter)
    # Every bound at which fewer than all stages would do is too small; `high` always suffices for one stage.
    while high - low > 1:
        middle = (low + high) // 2
        fewest = _fewest_after(problem, middle).get(0)
        if fewest is not None and fewest <= problem.stages:
            high = middle
        else:
            low = middle
    cuts = _best_cuts(problem, high)
    if cuts is not None:
        return cuts
    # Memory, or what each cut adds, stands against it: search above, now with the number of stages exact. The
    # first steps up are small, since the program is quick where the bound leaves little slack.
    top = problem.compute[-1] + max(problem.leave) + max(problem.enter)
    low, step = high, high // 1024 + 1
    while _lean_cuts(problem, high := min(low + step, top)) is None:
        if high == top:
            return None
        low, step = high, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if _lean_cuts(problem, middle) is None:
            low = middle
        else:
            high = middle
    return _best_cuts(problem, high)


def _best_cuts(problem: CutProblem, bound: int) -> Cuts | None:
    try:
        return _even_cuts(problem, bound)
    except _TooManyPairsError:
        return _lean_cuts(problem, bound)


def _fewest_after(problem: CutProblem, bound: int) -> dict[int, int]:
    """For each place, the fewest stages within `bound` from there to the end (memory left aside).

    Places from which the end can't be reached, or only in more stages than wanted, are left out.
    """
    places = problem.usable(bound)
    starts, ends = problem.starts, problem.ends
    fewest = {places[-1]: 0}
    # reach[v]: the smallest `ends` among the places seen so far that are at most v stages from the end. It
    # falls with v, so the first v that is near enough gives the answer.
    reach = [ends[places[-1]]]
    for place in reversed(places[:-1]):
        limit = bound + starts[place]
        if reach[-1] > limit:
            continue
        stages = len(reach)
        while stages > 1 and reach[stages - 2] <= limit:
            stages -= 1
        if stages > problem.stages:
            continue
        fewest[place] = stages
        if stages == len(reach):
            reach.append(min(reach[-1], ends[place]))
        else:
            for value in range(stages, len(reach)):
                if reach[value] <= ends[place]:
                    break
                reach[value] = ends[place]
    return fewest


class _TooManyPairsError(Exception):
    """The exact program would look at too many pairs of places."""


def _even_cuts(problem: CutProblem, bound: int) -> Cuts | None:
    """The cuts within `bound` with the fewest bytes across, then the least sum of squared stage times."""
    places = problem.usable(bound)
    fewest = _fewest_after(problem, bound)
    goods = [place for place in places if place in fewest]
    number = {place: index for index, place in enumerate(goods)}
    starts, ends, compute = problem.starts, problem.ends, problem.compute
    pairs = 0
    layer: dict[int, tuple[int, int]] = {0: (0, 0)} if 0 in fewest else {}
    back: list[dict[int, int]] = []
    for stage in range(problem.stages):
        left = problem.stages - stage - 1
        following: dict[int, tuple[int, int]] = {}
        came_from: dict[int, int] = {}
        for start, (crossing, squares) in sorted(layer.items()):
            limit = bound + starts[start]
            for index in range(number[start] + 1, len(goods)):
                end = goods[index]
                if compute[end] > limit or not problem.may_fit(stage, start, end):
                    break
                pairs += 1
                if ends[end] > limit or fewest[end] > left or len(goods) - 1 - index < left:
                    continue
                if not problem.fits(stage, start, end):
                    continue
                value = (crossing + problem.crossing[end], squares + problem.time(start, end) ** 2)
                if end not in following or value < following[end]:
                    following[end] = value
                    came_from[end] = start
            if pairs > _MOST_PAIRS:
                raise _TooManyPairsError
        layer = following
        back.append(came_from)
    end = goods[-1]
    if end not in layer:
        return None
    cuts = [end]
    for came_from in reversed(back):
        cuts.append(came_from[cuts[-1]])
    return tuple(reversed(cuts))


def _lean_cuts(problem: CutProblem, bound: int) -> Cuts | None:
    """The cuts within `bound` with the fewest bytes across, walked back to come out about even."""
    fewest = _fewest_after(problem, bound)
    places = tuple(place for place in problem.usable(bound) if place in fewest)
    if not places or places[0] != 0:
        return None
    layer: dict[int, int] = {0: 0}
    layers = [layer]
    for stage in range(problem.stages):
        left = problem.stages - stage - 1
        steps = _next_layer(problem, bound, places[bisect_left(places, min(layer)) :], stage, layer)
        layer = {place: crossing for place, crossing in steps if fewest[place] <= left}
        if not layer:
            return None
        layers.append(layer)
    end = places[-1]
    if end not in layer:
        return None
    cuts = [end]
    for stage in reversed(range(problem.stages)):
        cuts.append(_even_start(problem, bound, stage, layers[stage], layers[stage + 1], cuts[-1]))
    return tuple(reversed(cuts))


def _next_layer(
    problem: CutProblem, bound: int, places: Cuts, stage: int, layer: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """For each place at which stage number `stage` may end, the fewest bytes across all cuts up to there.

    `window` holds the starts still worth looking at, in order. A start leaves at the front when even an end
    without anything to send is too far, and at the back when a later one is as good in bytes and in time.
    """
    starts, ends, compute = problem.starts, problem.ends, problem.compute
    window: deque[tuple[int, int]] = deque()
    last = max(layer)
    for place in places:
        while window and (
            compute[place] - starts[window[0][0]] > bound or not problem.may_fit(stage, window[0][0], place)
        ):
            window.popleft()
        if not window and place > last:
            return
        lowest = ends[place] - bound
        fewest: int | None = None
        for start, crossing in window:
            is_less = fewest is None or crossing < fewest
            if is_less and starts[start] >= lowest and problem.fits(stage, start, place):
                fewest = crossing
        if fewest is not None:
            yield place, fewest + problem.crossing[place]
        if place in layer:
            crossing = layer[place]
            while (
                window
                and window[-1][1] >= crossing
                and starts[window[-1][0]] <= starts[place]
                and problem.is_as_small(stage, place, window[-1][0])
            ):
                window.pop()
            window.append((place, crossing))


def _even_start(
    problem: CutProblem, bound: int, stage: int, before: dict[int, int], after: dict[int, int], end: int
) -> int:
    """Among the best starts of the stage that ends at `end`, the one nearest to an equal share."""
    wanted = after[end] - problem.crossing[end]
    share = problem.compute[end] // (stage + 1)
    best: tuple[int, int] | None = None
    for start in range(end - 1, -1, -1):
        if (
            problem.compute[end] - problem.starts[start] > bound
            and problem.compute[end] - problem.compute[start] > bound
        ):
            break
        if not problem.may_fit(stage, start, end):
            break
        if (
            before.get(start) == wanted
            and problem.time(start, end) <= bound
            and problem.fits(stage, start, end)
        ):
            best = min(best or (bound + share, start), (abs(problem.time(start, end) - share), start))
    if best is None:
        raise AssertionError("unreachable: the layer was made from such a start")
    return best[1]
