"""Which nodes are captured together: regions as large as the order of the nodes allows.

Time is linear in nodes and edges but for one logarithm. What may not be moved past what is the splitter's
own knowledge (data, writes to shared memory, random numbers, side effects), so cutting at these regions
needs no repair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from partita.cudagraphs.regions.capturable import CaptureRules, CaptureRulings, Neutral, Refusal
from partita.cudagraphs.regions.coloured_partition import in_rounds
from partita.cudagraphs.regions.launch_savings import SavingModel
from partita.graph.effect_rules.node_effect import PURE, nodes_in
from partita.graph.effects import Effects, analyse, metadata
from partita.graph.liveness import tensor_bytes
from partita.graph.order import order_edges

__all__ = ["Region", "RegionPlan", "find_regions"]

_NOT_CAPTURED = "not captured"
_ANYWHERE = Neutral.NEUTRAL


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that are captured together.

    Attributes:
        key: the piece that they go into.
        device: of all their tensors.
        nodes: their names, in order.
        launches: how many kernels they start, as far as one can say.
        copies: how many of its inputs are copied in and outputs copied out at each replay.
        saved_s: seconds that a replay saves, by the `SavingModel`.
    """

    key: str
    device: torch.device
    nodes: tuple[str, ...] = field(repr=False)
    launches: int
    copies: int
    saved_s: float


@dataclass(frozen=True)
class RegionPlan:
    """What is captured, and of everything else why not.

    Attributes:
        regions: in the order in which they run.
        refusals: the nodes that can't be captured, in order of the graph.
        too_small: regions that could be captured and would save nothing.
        keys: the piece of each node by name: a region's, or one between regions.
        escaping: names of the values that outlive a run: they, or a view of them, are returned, or given
            to code that nobody knows.
        saved: names of those that outlive it only to be read by backward.
    """

    regions: tuple[Region, ...]
    refusals: tuple[Refusal, ...]
    keys: Mapping[str, str] = field(repr=False)
    too_small: tuple[Region, ...] = ()
    escaping: frozenset[str] = field(default=frozenset(), repr=False)
    saved: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def launches_saved(self) -> int:
        """Launches of kernels less launches of graphs, at each run."""
        return sum(region.launches - 1 for region in self.regions)

    @property
    def kept_in_place(self) -> frozenset[str]:
        """Names of the saved values that regions return: backward reads them where the recording put them."""
        regions = {region.key for region in self.regions}
        return frozenset(name for name in self.saved if self.keys.get(name) in regions)

    def __str__(self) -> str:
        nodes = sum(len(region.nodes) for region in self.regions)
        lines = [
            f"{len(self.regions)} regions with {nodes} nodes; {self.launches_saved} launches saved a run"
        ]
        lines += [
            f"  {region.key} on {region.device}: {len(region.nodes)} nodes, {region.launches} launches, "
            f"{region.copies} copies: {region.nodes[0]} ... {region.nodes[-1]}"
            for region in self.regions
        ]
        lines += [
            f"  not worth it: {len(region.nodes)} nodes, {region.launches} launches, {region.copies} copies: "
            f"{region.nodes[0]} ... {region.nodes[-1]}; lower min_launches and launch_s to capture it all "
            f"the same"
            for region in self.too_small
        ]
        if self.refusals:
            lines.append("not captured:")
            lines += [f"  {refusal}" for refusal in self.refusals]
        return "\n".join(lines)


def find_regions(
    gm: GraphModule,
    *,
    rules: CaptureRules | None = None,
    saving: SavingModel | None = None,
    static_inputs: Collection[str] = (),
    returned: int | None = None,
) -> RegionPlan:
    """Return the regions of a graph.

    Its nodes need example values, in ``meta["val"]`` or ``meta["example_value"]``.

    On one device no two regions could be one: each needs what stands between it and the one before. Nodes
    that can't be captured are gathered too, so a graph has as few regions as it has to have. ``gm`` is not
    changed.

    Args:
        saving: says which regions are worth it; by default all.
        static_inputs: names of the inputs that keep their addresses, so that nothing is copied: parameters,
            and of a backward graph what forward has `kept_in_place`.
        returned: how many of the outputs a caller gets; those behind them are saved for backward. By default
            all.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda x: (x.sin() * x.sum().item()).cos().exp(), tracing_mode="symbolic")(torch.ones(2))
    >>> plan = find_regions(gm, rules=CaptureRules(device_type="cpu"))
    >>> [region.nodes for region in plan.regions]
    [('sin', 'sum_1'), ('cos', 'exp')]
    """
    finder = _RegionFinder(gm, rules or CaptureRules(), frozenset(static_inputs), returned)
    return finder.run(saving)


class _RegionFinder:
    """The working state of one `find_regions` call."""

    def __init__(
        self, gm: GraphModule, rules: CaptureRules, static_inputs: frozenset[str], returned: int | None
    ) -> None:
        self.effects = analyse(gm)
        self.nodes = self.effects.nodes
        self.static_inputs = static_inputs
        self.rulings = CaptureRulings(gm, self.effects, rules)
        self.refusals: dict[int, Refusal] = {}
        self.colours: list[object] = [None] * len(self.nodes)
        self.edges = _edges(self.effects)
        self.escaping = _escaping(self.effects)
        self.returned = _escaping(self.effects, returned)
        self.makers = _memory_makers(self.effects)
        self.round_of: list[int] = []

    def run(self, saving: SavingModel | None) -> RegionPlan:
        # Phase 1: a colour for each node: the device that captures it, not captured, or either.
        switches = frozenset(self.effects.regions)
        for position, node in enumerate(self.nodes):
            if node.op in ("placeholder", "get_attr", "output") or position in switches:
                continue
            verdict = self.rulings.verdict(position)
            if isinstance(verdict, Refusal):
                self.refusals[position] = verdict
                self.colours[position] = _NOT_CAPTURED
            else:
                self.colours[position] = verdict

        # Phase 2: rounds of one colour each. A captured round is a region.
        self._assign_rounds()

        # Phase 3: give up regions that cost more than they save; what is left may then be fewer rounds.
        too_small: list[Region] = []
        while saving is not None and (given_up := self._dissolve(saving)):
            too_small += given_up
            self._assign_rounds()
        return self._plan(saving or SavingModel(), tuple(too_small))

    def _assign_rounds(self) -> None:
        self.round_of = in_rounds(self.colours, self.edges, first=_NOT_CAPTURED, neutral=_ANYWHERE)

    def _members(self) -> dict[int, list[int]]:
        """The positions of each round that is captured."""
        members: dict[int, list[int]] = {}
        captured: set[int] = set()
        for position, number in enumerate(self.round_of):
            if number >= 0:
                members.setdefault(number, []).append(position)
                if isinstance(self.colours[position], torch.device):
                    captured.add(number)
        return {number: members[number] for number in sorted(captured)}

    def _dissolve(self, saving: SavingModel) -> list[Region]:
        """Give up the regions that are not worth it. Those that read from one are looked at again, for what
        they read is then copied to them.
        """
        regions = self._members()
        given_up = []
        pending = deque(regions)
        while pending:
            number = pending.popleft()
            positions = regions.get(number, [])
            if not positions:
                continue
            costs = self._costs(positions, number, regions)
            if saving.is_worth_it(*costs):
                continue
            given_up.append(self._region("", positions, costs, saving))
            del regions[number]
            readers = (user for position in positions for user in self.nodes[position].users)
            pending.extend(dict.fromkeys(self.round_of[self.effects.index[user]] for user in readers))
            for position in positions:
                if isinstance(self.colours[position], torch.device):
                    self.colours[position] = _NOT_CAPTURED
        return given_up

    def _region(
        self, key: str, positions: list[int], costs: tuple[int, int, int], saving: SavingModel
    ) -> Region:
        colours = (self.colours[position] for position in positions)
        device = next(colour for colour in colours if isinstance(colour, torch.device))
        nodes = tuple(self.nodes[position].name for position in positions)
        return Region(key, device, nodes, costs[0], costs[1], saving.saved_s(*costs))

    def _costs(
        self, positions: list[int], number: int, regions: Mapping[int, object]
    ) -> tuple[int, int, int]:
        """Launches of a region, copies in and out, and their bytes."""
        launches = sum(self.rulings.launches(position) for position in positions)
        operands = {operand for position in positions for operand in self.nodes[position].all_input_nodes}
        copied = {operand for operand in operands if self._is_copied_in(operand, number, regions)}
        makers = {self.makers[position] for position in positions if position in self.returned}
        copied |= {self.nodes[maker] for maker in makers if self.round_of[maker] == number}
        values = [value for value in map(metadata, copied) if isinstance(value, torch.Tensor)]
        return launches, len(values), sum(tensor_bytes(value) or 0 for value in values)

    def _is_copied_in(self, node: Node, number: int, regions: Mapping[int, object]) -> bool:
        """Whether a value has no fixed address: no parameter, and nothing that a region returns."""
        if node.op == "placeholder":
            return node.name not in self.static_inputs
        origin = self.round_of[self.effects.index[node]]
        return node.op != "get_attr" and origin != number and origin not in regions

    def _plan(self, saving: SavingModel, too_small: tuple[Region, ...]) -> RegionPlan:
        members = self._members()
        names = {number: f"region_{count}" for count, number in enumerate(members)}
        regions = [
            self._region(names[number], positions, self._costs(positions, number, members), saving)
            for number, positions in members.items()
        ]
        between: dict[int, str] = {}
        keys = {}
        for position, number in enumerate(self.round_of):
            if number >= 0:
                key = names.get(number) or between.setdefault(number, f"between_{len(between)}")
                keys[self.nodes[position].name] = key
        refusals = tuple(self.refusals[position] for position in sorted(self.refusals))
        escaping = frozenset(self.nodes[position].name for position in self.escaping)
        saved = frozenset(self.nodes[position].name for position in self.escaping - self.returned)
        return RegionPlan(tuple(regions), refusals, keys, too_small, escaping, saved)


def _memory_makers(effects: Effects) -> list[int]:
    """For each node the one that made the memory of its value, which may be a view."""
    makers: list[int] = []
    for position in range(len(effects.nodes)):
        aliases = effects.by_position.get(position, PURE).aliases
        makers.append(makers[effects.index[aliases[0]]] if len(aliases) == 1 else position)
    return makers


def _edges(effects: Effects) -> list[list[int]]:
    """For each node those that follow it by data, by order, or by the state of a region that it decides."""
    edges: list[list[int]] = [[] for _ in effects.nodes]
    switches = frozenset(effects.regions)
    assigned = [
        node.op not in ("placeholder", "get_attr", "output") and position not in switches
        for position, node in enumerate(effects.nodes)
    ]
    # 1. Data; and what decides the state of a region (of autocast, say) comes before all behind its switch.
    decisive = -1  # the latest node whose value switched a region: all behind it may need it
    for position, node in enumerate(effects.nodes):
        operands = (effects.index[operand] for operand in node.all_input_nodes)
        before = {operand for operand in operands if assigned[operand]}
        if position in switches:
            latest = max(before, default=-1)
            if latest > decisive:
                if decisive >= 0:
                    edges[decisive].append(latest)
                decisive = latest
        elif assigned[position]:
            if decisive >= 0:
                before.add(decisive)
            for operand in before:
                edges[operand].append(position)
    # 2. Order: writes to shared memory, random numbers, side effects.
    seen: set[tuple[int, int]] = set()
    for edge in order_edges(effects):
        pair = (edge.before, edge.after)
        if pair not in seen and assigned[edge.before] and assigned[edge.after]:
            seen.add(pair)
            edges[edge.before].append(edge.after)
    return edges


def _escaping(effects: Effects, returned: int | None = None) -> frozenset[int]:
    """Positions of the values that may outlive the run, themselves, through a view, or in a container.

    Args:
        returned: only this many outputs count, if given.
    """
    escaping: set[int] = set()
    for position in range(len(effects.nodes) - 1, -1, -1):
        node = effects.nodes[position]
        effect = effects.by_position.get(position, PURE)
        if node.op == "output" and returned is not None and isinstance(node.args[0], (tuple, list)):
            escaping.update(effects.index[operand] for operand in nodes_in(node.args[0][:returned]))
        elif node.op == "output" or effect.entangles:
            escaping.update(effects.index[operand] for operand in node.all_input_nodes)
        elif position in escaping:
            escaping.update(effects.index[operand] for operand in effect.aliases)
    return frozenset(escaping)
