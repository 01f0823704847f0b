"""`CudaGraphsRunner` as the `PieceRunner` of a pipeline's stages and of pieces of a backward graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import AllWorthIt
from torch import nn
from torch.fx import GraphModule

from partita._torch.compile.aot import AotGraph, compile_ahead
from partita.cudagraphs import CudaGraphsRunner
from partita.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, UncutReference, keyed_graph, pipeline
from partita.runtime import Comm, InProcessWorld, PieceRunner, PlainRunner
from partita.splitter import split

pytestmark = pytest.mark.timeout(120)


def capturing() -> CudaGraphsRunner:
    return CudaGraphsRunner(recorder="replay", saving=AllWorthIt())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.tanh(self.c(torch.relu(self.b(torch.tanh(self.a(x)))))))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def hits(runner: CudaGraphsRunner, kind: str) -> int:
    return sum(
        info.hits for graph in runner.graphs if graph.kind == kind for info in graph.cache_info().values()
    )


def test_both_runners_are_piece_runners() -> None:
    assert isinstance(capturing(), PieceRunner)
    assert isinstance(PlainRunner(), PieceRunner)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_stages_of_a_pipeline_train_through_the_runner_bit_for_bit(schedule: type[Any]) -> None:
    """1F1B has several microbatches under way: what one has saved must not be overwritten by the next."""
    torch.manual_seed(0)
    model = Net()
    whole = keyed_graph(copy.deepcopy(model), (data(0)[0][:2],))
    pipe = pipeline(model, (data(0)[0][:2],), split_spec={"b": SplitPoint.END})
    runners: dict[int, CudaGraphsRunner] = {}

    def rank(comm: Comm) -> dict[str, torch.Tensor]:
        stage = pipe.build_stage(comm.rank, "cpu", comm=comm)
        runners[comm.rank] = capturing()
        module = stage.module
        stage.module = runners[comm.rank].for_module(module)
        step = schedule(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for number in range(4):
            x, target = data(number)
            step.step(*((x,) if comm.rank == 0 else ()), **({"target": target} if comm.rank else {}))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.detach().clone() for name, value in module.named_parameters()}

    trained: dict[str, torch.Tensor] = {}
    for state in InProcessWorld(2).run(rank):
        trained |= state
    reference = UncutReference(whole, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for number in range(4):
        x, target = data(number)
        reference.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in whole.named_parameters():
        assert torch.equal(trained[name], value), name
    for runner in runners.values():
        assert hits(runner, "forward") > 4
        assert hits(runner, "backward") > 4


def test_stages_run_by_themselves_forward_like_the_whole() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    pipe = pipeline(model, (data(0)[0],), split_spec={"b": SplitPoint.END}).eval()
    runner = capturing()
    first, second = (runner.for_module(pipe.get_stage_module(index)) for index in range(2))
    with torch.no_grad():
        for step in range(4):
            x, _ = data(step)
            assert torch.equal(second(first(x)), model(x))
    assert hits(runner, "inference") == 4


def test_a_runner_keeps_the_parameters_themselves() -> None:
    module = nn.Linear(2, 2)
    assert next(capturing().for_module(module).parameters()) is module.weight


def backward_in_pieces(runner: PieceRunner, model: nn.Module) -> Any:
    """Compile the model with its backward graph cut in three, as data parallel cuts it at its buckets, each
    piece through the runner.
    """

    def compile_graph(graph: AotGraph) -> GraphModule:
        gm = graph.gm
        if graph.kind != "backward":
            return gm
        order = [node for node in gm.graph.nodes if node.op == "call_function"]
        places = {node: 3 * number // len(order) for number, node in enumerate(order)}
        cut = split(gm, lambda node: places[node])
        for piece in cut.pieces:
            run = runner.for_graph(piece.module)
            setattr(cut.module, piece.name, _Runs(run))
        return cut.module

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return compile_ahead(gm, inputs, compile_graph)

    return torch.compile(model, backend=backend)


class _Runs(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


@pytest.mark.parametrize("runner", [PlainRunner(), capturing()], ids=["plain", "cudagraphs"])
def test_pieces_of_a_backward_graph_run_through_the_runner_bit_for_bit(runner: Any) -> None:
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    compiled = backward_in_pieces(runner, model)
    for step in range(4):
        x, target = data(step)
        for module in (compiled, reference):
            nn.functional.mse_loss(module(x), target).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert len(runner.graphs) == 3
    if isinstance(runner, CudaGraphsRunner):
        assert hits(runner, "piece") >= 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_graph_stays_as_it_is() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert CudaGraphsRunner().for_graph(gm) is gm
