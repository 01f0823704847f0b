"""Tied parameters: one gradient, whatever the number of copies, and one run of hooks for each microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pipelining.models import TRANSFORMER, WIDTH, Case, first_loss
from tests.pipelining.running import assert_equal, cut, keyed
from torch import Tensor, nn

from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining import (
    Schedule1F1B,
    SplitPoint,
    UncutReference,
    get_schedule_class,
    pipeline,
)
from partita.pipelining.tied.tied_sum import with_chains
from partita.runtime import Comm, InProcessWorld


def _run(
    case: Case,
    placement: tuple[int, ...],
    prepare: Callable[[nn.Module, int], None],
    *,
    tied_gradients: Any = "exact",
    kind: str = "1F1B",
    steps: int = 2,
) -> list[dict[str, Tensor | None]]:
    """Gradients by rank after steps that accumulate."""
    pipe = cut(case, len(placement))

    def body(comm: Comm) -> dict[str, Tensor | None]:
        own = copy.deepcopy(pipe)
        stages = [own.build_stage(i, comm=comm) for i, rank in enumerate(placement) if rank == comm.rank]
        for stage in stages:
            prepare(stage.module, comm.rank)
        schedule = get_schedule_class(kind)(stages, 4, case.loss, tied_gradients=tied_gradients)
        for step in range(steps):
            args, kwargs, target = case.data(8, seed=step)
            schedule.step(*args, target=target, **kwargs)
        return {
            name: value.grad
            for stage in stages
            for name, value in stage.module.named_parameters(remove_duplicate=False)
        }

    return InProcessWorld(max(placement) + 1).run(body)


def _uncut(case: Case, prepare: Callable[[nn.Module, int], None], steps: int = 2) -> dict[str, Tensor | None]:
    whole = keyed(case)
    prepare(whole, 0)
    runner = UncutReference(whole, 4, case.loss)
    for step in range(steps):
        args, kwargs, target = case.data(8, seed=step)
        runner.step(*args, target=target, **kwargs)
    return {name: value.grad for name, value in whole.named_parameters(remove_duplicate=False)}


def _nothing(_: nn.Module, __: int) -> None: ...


# --- one sum a step -------------------------------------------------------------


@pytest.mark.parametrize("placement", [(0, 1, 2, 0), (0, 0, 0)], ids=str)
def test_one_sum_a_step_is_the_gradient_of_the_uncut_model(placement: tuple[int, ...]) -> None:
    expected = _uncut(TRANSFORMER, _nothing)
    for gradients in _run(TRANSFORMER, placement, _nothing, tied_gradients="reduced"):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7)


def test_copies_stay_equal_bit_for_bit_over_training() -> None:
    pipe = cut(TRANSFORMER, 2)

    def body(comm: Comm) -> Tensor:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, TRANSFORMER.loss, tied_gradients="reduced")
        optimizer = torch.optim.AdamW(stage.module.parameters(), lr=0.05)
        for step in range(3):
            args, _, target = TRANSFORMER.data(8, seed=step)
            schedule.step(*args, target=target)
            optimizer.step()
            optimizer.zero_grad()
        return stage.module.get_parameter("embedding.weight").detach().clone()

    assert_equal(*InProcessWorld(2).run(body))


def _other_copy(module: nn.Module, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            module.get_parameter("embedding.weight").mul_(1.001)


@pytest.mark.parametrize("tied_gradients", ["exact", "reduced"])
def test_copies_that_have_drifted_apart_are_an_error(tied_gradients: str) -> None:
    """Each was trained on by itself, without a word: another model than the uncut one."""
    with pytest.raises(ExecutionError, match=r"'embedding.weight' in stages \[0, 1\] have drifted apart"):
        _run(TRANSFORMER, (0, 1), _other_copy, tied_gradients=tied_gradients, steps=1)


@pytest.mark.parametrize("tied_gradients", ["exact", "reduced"])
def test_so_are_copies_of_stages_of_one_rank_that_hold_two(tied_gradients: str) -> None:
    seen: list[Tensor] = []

    def prepare(module: nn.Module, _: int) -> None:
        """As after a move to another device, which gives each stage a copy of its own."""
        weight = module.get_parameter("embedding.weight")
        owner = module.get_submodule("embedding")
        owner.weight = nn.Parameter(weight.detach() + len(seen))
        seen.append(weight)

    with pytest.raises(ExecutionError, match=r"'embedding.weight' in stages \[0, 1\] have drifted apart"):
        _run(TRANSFORMER, (0, 0), prepare, tied_gradients=tied_gradients, steps=1)


@pytest.mark.parametrize("tied_gradients", ["exact", "reduced"])
def test_a_weight_decay_for_one_copy_alone_is_found_in_the_next_step(tied_gradients: Any) -> None:
    pipe, steps = cut(TRANSFORMER, 2), [0, 0]

    def body(comm: Comm) -> None:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, TRANSFORMER.loss, tied_gradients=tied_gradients)
        optimizer = torch.optim.AdamW(stage.module.parameters(), lr=0.05, weight_decay=0.1 * comm.rank)
        for step in range(4):
            args, _, target = TRANSFORMER.data(8, seed=step)
            schedule.step(*args, target=target)
            steps[comm.rank] += 1
            optimizer.step()

    with pytest.raises(ExecutionError, match="have drifted apart"):
        InProcessWorld(2).run(body)
    assert steps == [1, 1]


def test_nothing_of_a_tied_parameter_travels_during_the_step() -> None:
    pipe = cut(TRANSFORMER, 3)
    name = pipe.routes.tied[0].value.name
    exact, reduced = pipe.routes, with_chains(pipe.routes, chained=False)
    assert any(name in names for names in exact.backward.values())
    assert not any(name in names for names in reduced.backward.values())
    assert (0, 2) in exact.edges
    assert (0, 2) not in reduced.edges or any(pair == (0, 2) for pair in exact.forward)
    again = with_chains(reduced, chained=True)
    assert {pair: set(names) for pair, names in again.backward.items()} == {
        pair: set(names) for pair, names in exact.backward.items()
    }


def test_a_tied_parameter_that_the_loss_ignores_has_no_gradient() -> None:
    class CallEdge(nn.Module):
        """Both stages use a layer for a second result, which the loss leaves out."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.side = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            early = self.side(x)
            h = self.a(x)
            return self.b(h), self.side(early)

    case = Case("side", CallEdge, ("a",), loss=first_loss)
    assert [group.names for group in cut(case, 2).routes.tied] == [("side.weight",), ("side.bias",)]
    for gradients in _run(case, (0, 1), _nothing, tied_gradients="reduced"):
        assert gradients["side.weight"] is None


def test_ranks_that_differ_about_tied_gradients_say_so() -> None:
    pipe = cut(TRANSFORMER, 2)

    def body(comm: Comm) -> None:
        how = "exact" if comm.rank else "reduced"
        Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, tied_gradients=how)

    with pytest.raises(SignatureMismatch, match=r"tied_gradients is '(exact|reduced)' on rank"):
        InProcessWorld(2).run(body)


# --- hooks ----------------------------------------------------------------------


def _halve(module: nn.Module, _: int) -> None:
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.parametrize("kind", ["GPipe", "1F1B"])
def test_hooks_change_a_tied_gradient_once_and_before_it_is_added(kind: str) -> None:
    expected = _uncut(TRANSFORMER, _halve)
    for gradients in _run(TRANSFORMER, (0, 1, 2), _halve, kind=kind):
        assert_equal(gradients, {name: expected[name] for name in gradients})


def test_hooks_run_once_for_each_gradient_that_is_accumulated() -> None:
    counts: dict[str, list[int]] = {}

    def counting(where: str) -> Callable[[nn.Module, int], None]:
        def prepare(module: nn.Module, _: int) -> None:
            for name, parameter in module.named_parameters():
                calls = counts.setdefault(f"{where} {name}", [0, 0])

                def hook(_: Tensor, calls: list[int] = calls) -> None:
                    calls[0] += 1

                def post(_: Tensor, calls: list[int] = calls) -> None:
                    calls[1] += 1

                parameter.register_hook(hook)
                parameter.register_post_accumulate_grad_hook(post)

        return prepare

    _uncut(TRANSFORMER, counting("uncut"), steps=1)
    assert set(map(tuple, counts.values())) == {(4, 4)}
    _run(TRANSFORMER, (0, 1, 2), counting("cut"), steps=1)
    assert {tuple(calls) for name, calls in counts.items() if "embedding" not in name} == {(4, 4)}
    # one object has several names, and on each rank a copy: only the first stage's runs hooks
    tied = [tuple(calls) for name, calls in counts.items() if name.startswith("cut embedding")]
    assert tied == [(4, 4)]


def test_hooks_on_a_later_copy_alone_are_an_error() -> None:
    def prepare(module: nn.Module, rank: int) -> None:
        if rank == 1:
            _halve(module, rank)

    with pytest.raises(ExecutionError, match="has hooks in a later stage and none in the first"):
        _run(TRANSFORMER, (0, 1), prepare)


def test_hooks_on_shares_that_are_summed_once_a_step_are_an_error() -> None:
    with pytest.raises(ExecutionError, match="has hooks, which would see the shares of its"):
        _run(TRANSFORMER, (0, 1), _halve, tied_gradients="reduced")


class SparseTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, sparse=True)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(self.a(self.embed(ids).mean(1)) + self.embed(ids)[:, 0])


@pytest.mark.parametrize("tied_gradients", ["exact", "reduced"])
def test_sparse_gradients_that_several_stages_have_are_refused(tied_gradients: Any) -> None:
    ids, target = torch.randint(8, (8, 4)), torch.randint(3, (8,))
    pipe = pipeline(SparseTied(), (ids[:2],), split_spec={"a": SplitPoint.END})

    def train(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, nn.functional.cross_entropy, tied_gradients=tied_gradients)
        schedule.step(ids, target=target)

    with pytest.raises(ExecutionError, match=r"sparse.* sparse=False, or cut so that one stage has it"):
        InProcessWorld(2).run(train)
