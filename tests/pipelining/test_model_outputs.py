"""Models whose output is no plain tensor: objects with tensors in them, as caches and records are."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH, Case
from tests.pipelining.running import assert_same, cut, piped, uncut
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

import partita
from partita.capture import capture
from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, pipeline
from partita.runtime import Comm, InProcessWorld


class Layer:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class Cache:
    """Not known to torch's pytree, like the caches of language models."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []


@dataclass
class Output:
    logits: Tensor
    cache: Cache
    note: str = "as it is"
    nothing: None = None


class Decoder(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Output:
        cache = Cache()
        for block in self.blocks:
            x = torch.tanh(block(x))
            cache.layers.append(Layer(x * 2, self.dropout(x)))
        return Output(x, cache)


def _decoder(blocks: int = 4) -> Decoder:
    torch.manual_seed(0)
    return Decoder(blocks)


@pytest.mark.parametrize("training", [True, False])
def test_an_output_object_comes_back_as_the_class_that_it_is(training: bool) -> None:
    model, x = _decoder().train(training), torch.randn(2, 8)
    pipe = pipeline(model, (x,), split_spec={"blocks.1": SplitPoint.END})
    output = pipe(x)
    assert type(output) is Output
    assert type(output.cache.layers[3]) is Layer
    assert output.note == "as it is"
    partita.verify(pipe, model, (x,)).check()


def test_each_call_makes_an_object_of_its_own() -> None:
    model, x = _decoder().eval(), torch.randn(2, 8)
    module = capture(model, (x,)).module
    first, second = module(x), module(2 * x)
    assert first.cache is not second.cache
    assert not torch.equal(first.logits, second.logits)


def test_a_cut_whose_output_is_an_object_can_be_copied_and_pickled() -> None:
    model, x = _decoder().eval(), torch.randn(2, 8)
    pipe = pipeline(model, (x,), split_spec={"blocks.1": SplitPoint.END})
    again = pickle.loads(pickle.dumps(copy.deepcopy(pipe)))
    assert torch.equal(again(x).cache.layers[0].values, pipe(x).cache.layers[0].values)


def test_tensors_in_objects_are_merged_over_microbatches() -> None:
    model, x = _decoder(), torch.randn(8, 8)
    pipe = pipeline(model, (x[:2],), split_spec={"blocks.1": SplitPoint.END})
    expected = UncutReference(copy.deepcopy(pipe.whole), 4, _loss).step(x, target=torch.zeros(8))

    def body(comm: Comm) -> Any:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        return Schedule1F1B(stage, 4, _loss).step(x, target=torch.zeros(8))

    output = InProcessWorld(2).run(body)[-1]
    assert type(output) is Output
    assert output.logits.shape == (8, 8)
    for mine, theirs in zip(output.cache.layers, expected.cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


def test_results_of_early_layers_do_not_keep_the_planner_from_cutting_late() -> None:
    # Each layer's cache goes out of the model: the later the border, the more results lie behind it.
    model, x = _decoder(blocks=8), torch.randn(2, 8)
    assert pipeline(model, (x,), stages=8).num_stages == 8


class Spoilt(nn.Module):
    """Trains on its first result; autograd refuses to start from the second, with the whole model too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        e = h.exp()
        side = e * 2
        e.detach().mul_(0.5)
        return self.b(h.sin()), side


def test_a_result_that_nobody_can_train_on_is_handed_out_all_the_same() -> None:
    case = Case("spoilt", Spoilt, loss=lambda output, y: nn.functional.mse_loss(output[0], y))
    assert_same(piped(cut(case, 2), case), uncut(case))


def _loss(output: Output, target: Tensor) -> Tensor:
    return output.logits.square().mean() + sum(layer.keys.mean() for layer in output.cache.layers)


class Unnamed:
    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


register_pytree_node(
    Unnamed, lambda value: ([value.first, value.second], None), lambda parts, _: Unnamed(*parts)
)


class ReturnsUnnamed(nn.Sequential):
    def forward(self, x: Tensor) -> Unnamed:
        x = super().forward(x)
        return Unnamed(x, x * 2)


def test_an_output_class_that_was_registered_without_keys_comes_out_of_a_step() -> None:
    torch.manual_seed(0)
    model, x = ReturnsUnnamed(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(8, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.END})

    def train(comm: Comm) -> Any:
        schedule = Schedule1F1B(
            pipe.build_stage(comm.rank, comm=comm), 4, lambda out, target: ((out.second - target) ** 2).mean()
        )
        return schedule.step(*((x,) if comm.rank == 0 else ()), target=x)

    output = InProcessWorld(2).run(train)[1]
    assert type(output) is Unnamed
    assert torch.equal(output.second, torch.cat([model(part).second for part in x.chunk(4)]))


def test_a_model_may_return_a_distribution() -> None:
    """It holds a ``torch.Size`` with the open size of the batch, which the cut could not be made with."""

    class Policy(nn.Sequential):
        def forward(self, x: Tensor) -> torch.distributions.Categorical:
            return torch.distributions.Categorical(logits=super().forward(x))

    model = Policy(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    pipe = pipeline(model, (torch.randn(2, 8),), split_spec={"2": SplitPoint.BEGINNING})
    x, actions = torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    assert pipe(x).batch_shape == (6,)
    assert torch.equal(pipe(x).log_prob(actions), model(x).log_prob(actions))

    def loss(output: torch.distributions.Categorical, target: Tensor) -> Tensor:
        return -output.log_prob(target).mean()

    def body(comm: Comm) -> list[Tensor]:
        losses: list[Tensor] = []
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 2, loss)
        schedule.step(x, target=actions, losses=losses, return_outputs=False)
        return losses

    expected = [loss(model(x[part]), actions[part]) for part in (slice(3), slice(3, 6))]
    assert all(map(torch.equal, InProcessWorld(2).run(body)[-1], expected))
