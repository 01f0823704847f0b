from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import partita
from partita._torch.export.assigned_buffers import write_assigned_buffers_at_once
from partita.capture import capture
from partita.pipelining import Schedule1F1B, UncutReference, pipeline
from partita.pipelining.training import verify_step
from partita.runtime import Comm, InProcessWorld


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("queue", torch.arange(12.0).reshape(3, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.assigned(self.a(x)))

    def assigned(self, h: Tensor) -> Tensor:
        return h


class Saved(Layers):
    """Autograd saves the old mean."""

    def assigned(self, h: Tensor) -> Tensor:
        h = h * self.mean
        self.mean = self.mean + 1
        return h


class Average(Layers):
    """In training alone, twice."""

    def assigned(self, h: Tensor) -> Tensor:
        old = self.mean
        if self.training:
            for _ in range(2):
                self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - old + self.mean


class Queue(Layers):
    def assigned(self, h: Tensor) -> Tensor:
        likeness = h @ self.queue.t()
        self.queue = torch.cat([self.queue[1:], h.detach().mean(0, keepdim=True)])
        return h + likeness.mean()


class WrittenInPlace(Layers):
    """As ``spectral_norm`` does: what is assigned is the buffer itself."""

    def assigned(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = torch.nn.functional.normalize(self.a.weight.mv(self.mean), dim=0, out=self.mean)
        return h * self.mean.clone()


class Returns(Layers):
    """The old one is a result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        old, self.mean = self.mean, self.a(x).detach().mean(0)
        return self.b(x) + self.mean, old


class ThenInPlace(Layers):
    def assigned(self, h: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean
        self.mean.view(4).add_(h.detach().mean(0))
        return h + self.mean


class FromTheInput(Layers):
    def assigned(self, h: Tensor) -> Tensor:
        return h + self.mean

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x
        return super().forward(x)


def x(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [Saved, Average, Queue, WrittenInPlace, Returns, ThenInPlace])
def test_the_graph_is_the_model_in_several_calls(kind: type[Layers]) -> None:
    model = kind()
    graph = capture(copy.deepcopy(model), (x(),), prove=True).module
    for seed in range(3):
        partita.verify(graph, model, (x(seed),)).check()
        graph(x(seed)), model(x(seed))
    for name, value in model.named_buffers():
        assert torch.equal(graph.get_buffer(name), value)


@pytest.mark.parametrize("kind", [Saved, Average, Queue, WrittenInPlace])
def test_submodules_assign_too_and_microbatches_do_not_disturb_each_other(kind: type[Layers]) -> None:
    model = nn.Sequential(kind(), nn.Tanh(), kind(), nn.Tanh(), kind())
    pipe = pipeline(copy.deepcopy(model), (x(),), stages=2)

    def train(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, nn.MSELoss())
        reference = UncutReference(copy.deepcopy(model), 4, nn.MSELoss())
        for step in range(2):
            batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
            verify_step(schedule, reference, batch, target=torch.zeros(12, 4))

    InProcessWorld(2).run(train)
    assert pipe.proof.holds
    for seed in range(2):
        assert torch.equal(pipe(x(seed)), model(x(seed)))


def test_what_reads_the_old_value_reads_a_copy_and_the_new_one_is_written_when_it_is_there() -> None:
    graph = capture(Saved(), (x(),), modes="train").module.graph
    order = [node.name for node in graph.nodes if node.op == "call_function"]
    assert order.index("copy__default") == order.index("add") + 1
    (read,) = graph.find_nodes(op="get_attr", target="mean")
    assert {node.name for node in read.users} == {"clone_default", "copy__default"}


def test_a_value_that_is_an_input_is_written_first() -> None:
    model = FromTheInput()
    graph = capture(copy.deepcopy(model), (x(),), dynamic_shapes=False).module
    assert torch.equal(graph(x(1)), model(x(1)))


def test_writes_of_the_model_itself_stay_where_they_are() -> None:
    class Writes(Layers):
        def assigned(self, h: Tensor) -> Tensor:
            self.mean.copy_(self.mean + 1)
            return h * self.mean

    graph = capture(Writes(), (x(),)).module
    before = str(graph.graph)
    write_assigned_buffers_at_once(graph)
    assert str(graph.graph) == before
