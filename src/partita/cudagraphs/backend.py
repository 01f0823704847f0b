"""The backend for ``torch.compile``: forward, backward and inference graphs, each captured piece by piece.

::

    model -- dynamo --> graph -- AOTAutograd --> forward, backward   (functional; writes at the end)
                                                    |
                                               find_regions          what can be captured, what is worth it
                                                    |
                                               cut_at_regions        region_0  between_0  region_1 ...
                                                    |
                                               CudaGraphModule       a recording for each kind of call
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from partita._torch.compile.aot import AotGraph, compile_ahead
from partita._torch.operators.call_recording import WholeCall
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.facts.written_inputs import find_input_mutations
from partita.cudagraphs.options import BackendOptions
from partita.cudagraphs.padding.padding import PaddedGraph, plan_padding
from partita.cudagraphs.recording.recorder import GraphRecorder
from partita.cudagraphs.regions.grouping import RegionPlan, find_regions
from partita.cudagraphs.regions.partition import cut_at_regions
from partita.cudagraphs.replaying.entry import CacheInfo
from partita.cudagraphs.replaying.input_memory import InputMemory
from partita.cudagraphs.replaying.module import CudaGraphModule
from partita.errors import ArgumentError
from partita.graph.effects import metadata
from partita.runtime.graph_compiler import runs_as_it_is
from partita.splitter.result import Piece

__all__ = ["CapturedGraph", "CudaGraphsBackend", "GraphKind", "cudagraphs"]

GraphKind = Literal["forward", "backward", "inference", "piece"]
"""Of a model: what AOTAutograd made it for. A piece is one that somebody else has cut."""

_LOG = logging.getLogger("partita.cudagraphs")


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that the backend was given.

    Attributes:
        kind: what it computes.
        plan: its regions, and why the rest is not captured.
        module: runs it.
        regions: those of its pieces that are recorded.
        padding: what pads its batch; or why it can't be padded; None where nobody asked.
    """

    kind: GraphKind
    plan: RegionPlan
    module: GraphModule = field(repr=False)
    regions: tuple[CudaGraphModule, ...] = field(repr=False)
    padding: PaddedGraph | str | None = field(default=None, repr=False)

    def cache_info(self) -> dict[str, CacheInfo]:
        """What each region has recorded."""
        return {region.region: region.cache_info() for region in self.regions}


class CudaGraphsBackend:
    """A backend for ``torch.compile``; it keeps what it has compiled, so that one can look at it.

    All graphs of one backend record into the same memory, and run one at a time.

    Args:
        options: see `BackendOptions`.

    ``torch.compile(model, backend=CudaGraphsBackend())`` is the usual way; a graph can be captured by
    itself too:

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda x: x.sin().cos().sin().cos().sin().cos(), tracing_mode="fake")(torch.zeros(2))
    >>> backend = CudaGraphsBackend(recorder="replay")
    >>> captured = backend.capture(gm)
    >>> results = [captured(torch.ones(2)) for _ in range(3)]
    >>> torch.equal(results[0], results[2]), backend.graphs[0].regions[0].cache_info().hits
    (True, 1)
    """

    def __init__(self, **options: Any) -> None:
        self.options = BackendOptions.of(options)
        self.graphs: list[CapturedGraph] = []
        self._memory = StableMemory()
        self._recorders: dict[torch.device, GraphRecorder] = {}

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo's. One that would compute other numbers then runs as it is, with a
        `NotCompiled` warning.
        """
        if not self.options.records:
            _say_once()
            return gm.forward
        if runs_as_it_is(gm):
            return gm.forward
        return compile_ahead(gm, inputs, self._compile_graph, by_operator=self.options.compiler is None)

    def _compile_graph(self, graph: AotGraph) -> Callable[..., Any]:
        kept = frozenset(graph.kept_in_place)
        captured = self.capture(graph.gm, graph.kind, graph.static_inputs, graph.returned, kept)
        graph.kept_in_place.update(self.graphs[-1].plan.kept_in_place)
        return self._padded(graph.gm, captured) if self.options.buckets else captured

    def capture(
        self,
        gm: GraphModule,
        kind: GraphKind = "inference",
        static_inputs: frozenset[str] = frozenset(),
        returned: int | None = None,
        kept_in_place: frozenset[str] = frozenset(),
    ) -> GraphModule:
        """Cut a flat graph with example values at its regions; those are recorded when the result runs.

        Args:
            static_inputs: names of the inputs that keep their addresses (parameters, buffers).
            returned: how many of the outputs a caller gets; those behind them are saved for backward, and
                handed out in place as long as backward gives them back in time. By default all.
            kept_in_place: names of the inputs that lie where another region of this model returns them.
        """
        plan = find_regions(
            gm,
            rules=self.options.rules(),
            saving=self.options.saving,
            static_inputs=static_inputs | kept_in_place,
            returned=returned,
        )
        cut = cut_at_regions(gm, plan)
        devices = {region.key: region.device for region in plan.regions}
        captured = []
        for piece in cut.pieces:
            run = self._compiled(piece)
            if piece.key not in devices:
                if run is not None:
                    setattr(cut.module, piece.name, _Compiled(run))
                continue
            region = self._region(piece, devices[piece.key], plan, static_inputs, run)
            setattr(cut.module, piece.name, region)
            captured.append(region)
        self.graphs.append(CapturedGraph(kind, plan, cut.module, tuple(captured)))
        _LOG.info("%s graph: %s", kind, plan)
        return cut.module

    def input_memory(self) -> InputMemory:
        """Return memory for inputs that are written before each call, and lie where recordings read them."""
        return InputMemory(self._memory, self.options.max_recordings)

    def _padded(self, gm: GraphModule, captured: GraphModule) -> Callable[..., Any]:
        """What pads the batch of the graph captured last, or the graph as it is where that can't be."""
        options, latest = self.options, self.graphs[-1]
        padding = plan_padding(gm, latest.kind, captured, options.buckets, options.rows_apart, self._memory)
        if isinstance(padding, str):
            _LOG.warning("the batch of a graph (%s) is not padded: %s", latest.kind, padding)
        self.graphs[-1] = replace(latest, padding=padding)
        return captured if isinstance(padding, str) else padding

    def _region(
        self,
        piece: Piece,
        device: torch.device,
        plan: RegionPlan,
        static_inputs: frozenset[str],
        run: Callable[..., Any] | None,
    ) -> CudaGraphModule:
        if device not in self._recorders:
            self._recorders[device] = self.options.make_recorder(device)
        return CudaGraphModule(
            piece.module,
            recorder=self._recorders[device],
            static_inputs=[number for number, name in enumerate(piece.inputs) if name in static_inputs],
            transient_outputs=[
                number for number, name in enumerate(piece.outputs) if name not in plan.escaping
            ],
            saved_outputs=[number for number, name in enumerate(piece.outputs) if name in plan.saved],
            memory=self._memory,
            max_recordings=self.options.max_recordings,
            run=run,
            name=piece.name,
        )

    def _compiled(self, piece: Piece) -> Callable[..., Any] | None:
        compiler = self.options.compiler
        if compiler is None:
            return None
        examples = [metadata(node) for node in piece.module.graph.nodes if node.op == "placeholder"]
        written = find_input_mutations(piece.module.graph)
        return WholeCall(compiler(piece.module, examples), written)


def cudagraphs(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend ``"partita_cudagraphs"``: torch's ``cudagraphs``, but one node that can't be captured
    costs only itself.

    Args:
        mode: there is none; ``torch.compile(..., mode=...)`` hands it on.
        options: see `BackendOptions`; ``torch.compile(..., options={...})`` hands them on.

    Raises:
        ArgumentError: an option that can't be used, or a mode.
    """
    if mode is not None:
        raise ArgumentError(
            f"mode is {mode!r}, and modes are Inductor's: partita_cudagraphs records in any case, so leave "
            'it out; options={"inner": "inductor"} compiles what is recorded'
        )
    return CudaGraphsBackend(**dict(options or {}))(gm, inputs)


class _Compiled(torch.nn.Module):
    """A compiled piece between two regions."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


@cache
def _say_once() -> None:
    _LOG.warning(
        "partita_cudagraphs: there is no CUDA device, so nothing is captured and the model runs as it is. "
        'To try it on the CPU, pass options={"recorder": "replay"}'
    )
