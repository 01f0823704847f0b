"""What would be captured of a model, and what not and why, without recording anything."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from partita._torch.compile.graph_breaks import Break
from partita._torch.compile.traced import TracedModel, pretend_device, trace_model
from partita._torch.containers.pytree import tree_map
from partita.cudagraphs.facts.source_line import source_line
from partita.cudagraphs.regions.capturable import CaptureRules
from partita.cudagraphs.regions.grouping import RegionPlan, find_regions
from partita.cudagraphs.regions.launch_savings import SavingModel
from partita.errors import CaptureError

__all__ = ["ExplainedGraph", "Explanation", "explain"]

_ASSUMED = (
    "There is no CUDA device here, so the model was not run: it was traced on the meta device, and its "
    "graphs are judged as if all that lies there lay on one GPU. Values that the host reads stay in the "
    "graph, where torch.compile breaks the graph by default; attention is shown in its parts, where a GPU "
    "has one kernel for it; code that asks for a tensor's device sees 'meta'."
)
_KEPT = "the host reads a value of a tensor here; torch.compile ends the graph by default"
_KEEP = (
    "set torch._dynamo.config.capture_scalar_outputs and capture_dynamic_output_shape_ops, as was done here"
)
_CPU = "Judged for ReplayRecorder, which records on the CPU: tensors on the CPU count as capturable."
_MEASURED = "The model was run once on {device}."


@dataclass(frozen=True)
class ExplainedGraph:
    """One graph of the model.

    Attributes:
        kind: what it computes.
        nodes: how many operators it has.
        plan: its regions, and why the rest is not captured.
    """

    kind: Literal["forward", "backward", "inference"]
    nodes: int
    plan: RegionPlan


@dataclass(frozen=True)
class Explanation:
    """What the backend would make of a model.

    Attributes:
        graphs: in the order in which they are made.
        breaks: where ``torch.compile`` ends a graph, or leaves a function to Python.
        kept: where it ends one with its default options, and did not here, since nothing was computed.
        stopped: why the rest of the model could not be traced, or an empty string.
        assumed: whether the device was assumed, and nothing was computed.
        device: on which the graphs are judged.
        note: how far one can trust this, as a sentence or two.
    """

    graphs: tuple[ExplainedGraph, ...]
    breaks: tuple[Break, ...]
    kept: tuple[Break, ...]
    stopped: str
    assumed: bool
    device: torch.device
    note: str

    @property
    def launches_saved(self) -> int:
        """Launches saved a run, over all graphs."""
        return sum(graph.plan.launches_saved for graph in self.graphs)


@dataclass(frozen=True)
class _TraceDevice:
    """Where a model is traced, and where it is judged."""

    traced: torch.device
    judged: torch.device
    note: str = field(default="", repr=False)

    @property
    def assumed(self) -> bool:
        return self.traced != self.judged


def explain(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = False,
    device: str = "cuda",
    saving: SavingModel | None = None,
    allow: frozenset[str] = frozenset(),
) -> Explanation:
    """Capture a model's graphs as the backend would, and find their regions.

    Nothing is recorded, and neither ``module`` nor the arguments are changed: a copy is moved to the device.
    With ``device="cuda"`` on a machine without a GPU nothing is computed, see ``note`` of the result.

    Args:
        train: the forward and the backward graphs of a training step, from the sum of the results; else the
            inference graphs. The training flags of ``module`` are taken as they are.
        device: ``"cuda"``, ``"cuda:1"`` ..., or ``"cpu"``, as `ReplayRecorder` would record it.
        saving: which regions are worth it.
        allow: custom operators that may be captured, see `CaptureRules`.

    Raises:
        CaptureError: the model can't be moved to the device, or can't be traced; with its own error.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    >>> all_of_it = SavingModel(min_launches=1, replay_s=0.0)
    >>> explanation = explain(model, (torch.ones(2, 4),), device="cpu", saving=all_of_it)
    >>> [graph.kind for graph in explanation.graphs], explanation.launches_saved
    (['inference'], 3)
    """
    target = _trace_device(device)
    try:
        moved = copy.deepcopy(module).to(target.traced)
        inputs = tree_map(lambda leaf: _moved(leaf, target.traced), (tuple(args), dict(kwargs or {})))
        generators = [target.traced] if target.traced.type == "cuda" else []
        with torch.random.fork_rng(generators):
            traced = trace_model(moved, *inputs, train=train, compute=not target.assumed)
    except Exception as error:
        raise CaptureError(
            f"the model can't be traced on {target.traced}; run it there once without torch.compile to see "
            f"where. {type(error).__name__}: {error}"
        ) from error
    _check_has_graphs(traced, target)
    if target.assumed:
        pretend_device(traced.graphs, target.traced.type, target.judged)
    rules = CaptureRules(target.judged.type, allow)
    graphs: list[ExplainedGraph] = []
    for graph in traced.graphs:
        plan = find_regions(
            graph.gm,
            rules=rules,
            saving=saving or SavingModel(),
            static_inputs=graph.static_inputs | graph.kept_in_place,
            returned=graph.returned,
        )
        nodes = sum(node.op not in ("placeholder", "get_attr", "output") for node in graph.gm.graph.nodes)
        graphs.append(ExplainedGraph(graph.kind, nodes, plan))
        graph.kept_in_place.update(plan.kept_in_place)
    breaks = _each_once(traced.breaks)
    kept = tuple(dict.fromkeys(Break(_KEPT, _KEEP, source_line(node)) for node in traced.host_reads))
    return Explanation(
        tuple(graphs), breaks, kept, traced.stopped, target.assumed, target.judged, target.note
    )


def _each_once(breaks: Sequence[Break]) -> tuple[Break, ...]:
    """A function breaks again at the same place where it is called anew, and where its caller was traced."""
    each: dict[tuple[str, str], Break] = {}
    for item in breaks:
        key = (item.source, item.details.partition("\n")[0])
        if key not in each or item.skipped > each[key].skipped:
            each[key] = item
    return tuple(each.values())


def _trace_device(name: str) -> _TraceDevice:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return _TraceDevice(device, device, _CPU)
    if device.type != "cuda":
        raise CaptureError(f"device is {name!r}: give 'cuda', 'cuda:1' and so on, or 'cpu'")
    indexed = torch.device("cuda", device.index or 0)
    if not torch.cuda.is_available():
        return _TraceDevice(torch.device("meta"), indexed, _ASSUMED)
    if indexed.index >= torch.cuda.device_count():
        raise CaptureError(f"device is {name!r}, and there are {torch.cuda.device_count()} CUDA devices")
    target = _TraceDevice(indexed, indexed)
    return replace(target, note=_MEASURED.format(device=torch.cuda.get_device_name(indexed)))


def _moved(leaf: Any, device: torch.device) -> Any:
    """A tensor's copy on the device, with a history of its own."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)


def _check_has_graphs(traced: TracedModel, target: _TraceDevice) -> None:
    """A model of which all runs as Python is explained by its breaks; without any there is nothing to say."""
    if traced.graphs or traced.breaks:
        return
    why = traced.stopped or (
        "it does nothing with tensors, or its forward is excluded (torch.compiler.disable, or code of a "
        "library that torch.compile skips)"
    )
    advice = ". With --device cpu it is run, so that values are there" if target.assumed else ""
    raise CaptureError(f"torch.compile makes no graph of the model on {target.traced}: {why}{advice}")
