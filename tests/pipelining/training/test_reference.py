from __future__ import annotations

import copy
import pickle
import random
from typing import cast

import pytest
import torch
from tests.pipelining.models import MASK, PLAIN, REUSED, TRANSFORMER
from tests.pipelining.running import keyed
from torch import Tensor, nn

from partita.errors import ArgumentError, SignatureMismatch
from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, keyed_graph, pipeline
from partita.pipelining.training import verify_step
from partita.runtime import Comm, InProcessWorld


def test_without_random_numbers_it_is_the_model_over_microbatches() -> None:
    args, _, target = PLAIN.data(8)
    model, other = PLAIN.model(), PLAIN.model()
    losses: list[torch.Tensor] = []
    output = UncutReference(keyed_graph(model, (args[0][:2],)), 4, PLAIN.loss).step(
        *args, target=target, losses=losses
    )
    parts = list(zip(args[0].split(2), target.split(2), strict=True))
    expected = [PLAIN.loss(other(x), y) for x, y in parts]
    for loss in expected:
        (loss * 0.25).backward()
    assert torch.equal(output, torch.cat([other(x) for x, _ in parts]))
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_random_numbers_depend_on_seed_and_step_and_not_on_torchs_generator() -> None:
    args, _, target = TRANSFORMER.data(4)
    whole = keyed(TRANSFORMER)

    def losses(seed: int) -> list[float]:
        values, reference = [], UncutReference(whole, 2, TRANSFORMER.loss, seed=seed)
        for _ in range(2):
            step: list[torch.Tensor] = []
            reference.step(*args, target=target, losses=step)
            values += [loss.item() for loss in step]
        return values

    torch.manual_seed(0)
    first = losses(0)
    torch.manual_seed(1)
    assert losses(0) == first
    assert len({*first, *losses(1)}) == 8


def test_eval_makes_no_gradients_and_fills_losses_where_there_is_a_target() -> None:
    args, _, target = PLAIN.data(8)
    model = PLAIN.model()
    reference = UncutReference(keyed_graph(model, (args[0][:2],)), 4, PLAIN.loss)
    losses: list[torch.Tensor] = []
    assert not reference.eval(*args, losses=losses).requires_grad
    assert losses == []
    reference.eval(*args, target=target, losses=losses)
    assert len(losses) == 4
    assert model.a.weight.grad is None


class WithLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "y": y}


def test_a_loss_in_the_models_output_is_trained_as_a_schedule_trains_it() -> None:
    # The reference ran forward only, so that what it was compared with seemed to be wrong.
    x, labels = torch.randn(8, 4), torch.randn(8, 4)
    model = WithLoss()
    trained, expected = copy.deepcopy(model), copy.deepcopy(model)
    pipe = pipeline(trained, (x[:2], labels[:2]), stages=1)
    theirs: list[torch.Tensor] = []

    def step(comm: Comm) -> dict[str, int]:
        schedule = Schedule1F1B(pipe.build_stage(0, comm=comm), 4)
        schedule.step(x, labels, losses=theirs)
        return schedule.state_dict()

    assert InProcessWorld(1).run(step) == [{"steps": 1}]
    for whole in (expected, keyed_graph(model, (x[:2], labels[:2]))):
        losses: list[torch.Tensor] = []
        reference = UncutReference(whole, 4)
        reference.step(x, labels, losses=losses)
        assert reference.state_dict() == {"steps": 1}
        assert torch.equal(torch.stack(losses), torch.stack(theirs))
    for one, two, three in zip(trained.parameters(), expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
        assert torch.equal(one.grad, three.grad)


def test_outputs_that_lie_in_a_reused_buffer_are_kept_for_each_microbatch() -> None:
    args, _, _ = REUSED.data(8)
    _, seen = UncutReference(keyed(REUSED), 4).eval(*args)
    assert not torch.equal(seen[:2], seen[2:4])


def test_attention_without_dropout_draws_nothing() -> None:
    """Models cut at their blocks have no graph that says where they draw; those with attention were refused,
    with the advice to set their dropout to 0.
    """

    def attention(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.register_forward_hook(lambda _module, _args, output: attention(output.unsqueeze(1)).squeeze(1))
    x, losses = torch.randn(4, 3, 4), list[torch.Tensor]()
    UncutReference(model, 2, lambda output, _: output.mean()).step(x, target=x, losses=losses)
    expected = [attention(model[0](part).unsqueeze(1)).mean() for part in x.split(2)]
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)


def test_what_can_not_be_run_is_refused() -> None:
    args, kwargs, _ = MASK.data(8)
    small, named, _ = MASK.data(2)
    reference = UncutReference(keyed_graph(MASK.model(), small, named), 4)
    with pytest.raises(
        SignatureMismatch, match=r"microbatch 0 brings float32\[2, 7\] for x: float32\[batch, 8\]"
    ):
        reference.eval(args[0][:, :7], args[1], **kwargs)
    assert reference.eval(*args, **kwargs).shape == (8, 8)


def test_a_graph_that_was_pickled_is_refused_and_the_model_beside_it_is_the_reference() -> None:
    args, _, target = TRANSFORMER.data(4)
    model = TRANSFORMER.model()
    pipe = pipeline(model, (args[0][:2],), stages=2, prove=False)
    loaded = pickle.loads(pickle.dumps(pipe))
    with pytest.raises(ArgumentError, match="was pickled, and what it was captured with stayed behind"):
        UncutReference(loaded.whole, 2, TRANSFORMER.loss).step(*args, target=target)
    losses: list[list[torch.Tensor]] = [[], []]
    for own, graph in zip(losses, (pipe.whole, loaded.whole), strict=True):
        reference = UncutReference(copy.deepcopy(model), 2, TRANSFORMER.loss, graph=graph)
        reference.step(*args, target=target, losses=own)
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


class _Masks(nn.Module):
    """Masks a column that Python's generator chooses, as SpecAugment of wav2vec 2 does with numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = torch.ones(8)
        mask[random.randrange(8)] = 0
        return {"loss": cast(Tensor, self.b(self.a(x) * mask)).square().mean()}


def test_pythons_random_numbers_are_those_of_a_step() -> None:
    """The reference drew from the generator as it was, and `verify_step` said that the step differs."""
    model = _Masks()
    pipe = pipeline(model, (torch.randn(2, 8),), split_spec={"b": SplitPoint.BEGINNING}, frontend="modules")
    x = torch.randn(8, 8)

    def train(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4)
        verify_step(schedule, UncutReference(copy.deepcopy(model), 4), x)

    before = random.getstate()
    InProcessWorld(2).run(train)
    assert random.getstate() == before
