"""Stages for the graph of evaluation, from those of the graph of training."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest
import torch
from tests.pipelining.frontends.graph.autoencoder import Autoencoder
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils.parametrizations import spectral_norm

from partita.capture import Captured, capture
from partita.pipelining.frontends.cuts.cuts import stage_assignment
from partita.pipelining.frontends.graph.other_mode import (
    by_mode,
    check_shared_buffers,
    ends_in_both_modes,
    matched_assignment,
)
from partita.pipelining.frontends.graph.units.costs import unit_ends


@pytest.fixture(scope="module")
def normed() -> tuple[Captured, Captured]:
    model = nn.Sequential(*(spectral_norm(nn.Linear(4, 4)) for _ in range(2)))
    train, evaluation = by_mode(capture(model, (torch.randn(2, 4),), prove=False))
    assert evaluation is not None
    return train, evaluation


def test_a_norm_is_worked_out_beside_the_buffers_that_it_writes_in_training(
    normed: tuple[Captured, Captured],
) -> None:
    """A planned cut fell between the power iteration, which only training has, and what evaluation shares
    with it, and was refused: stage 1 would have used in evaluation what stage 0 writes in training.
    """
    graph, other = (captured.module for captured in normed)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    linear = [number for number, node in enumerate(calls) if "linear" in str(node.target)]
    tried = 0
    for cut in range(linear[0] + 1, linear[1] + 1):
        assignment = {node.name: int(number >= cut) for number, node in enumerate(calls)}
        users = [
            {assignment[user.name] for user in node.users} for node in graph.graph.find_nodes(op="get_attr")
        ]
        if {0, 1} in users:  # no cut: within the power iteration
            continue
        tried += 1
        stages = matched_assignment(graph, assignment, other)
        check_shared_buffers(graph, assignment, other, stages)
        for node in other.graph.nodes:
            if node.name in stages:
                before = [stages.get(operand.name, 0) for operand in node.all_input_nodes]
                assert max(before, default=0) <= stages[node.name]
    assert tried > 1


def test_a_plan_cuts_only_where_the_other_mode_can_be_cut_too() -> None:
    """Three planned stages of an autoencoder were refused: one had noise alone, which only training has."""
    train, evaluation = by_mode(capture(Autoencoder(), (torch.randn(2, 4),), prove=False))
    assert evaluation is not None
    *_, every = unit_ends(train.module)
    ends = ends_in_both_modes(train.module, every, evaluation.module)
    assert set(ends) < set(every)
    assert len(ends) >= 2
    for count in range(1, len(ends) + 1):
        for cuts in combinations(ends, count):
            stages = matched_assignment(train.module, stage_assignment(train.module, cuts), evaluation.module)
            assert set(stages.values()) == set(range(count + 1))


class Codebook(nn.Module):
    """Moves its codes in training, as in VQ-VAE, which has two ``t()`` and two ``@``; evaluation has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        lengths = z.pow(2).sum(1, keepdim=True) + self.codes.pow(2).sum(1)
        index = (lengths - 2 * z @ self.codes.t()).argmin(1)
        code = nn.functional.embedding(index, self.codes)
        if self.training:
            with torch.no_grad():
                chosen = nn.functional.one_hot(index, 6).to(z.dtype)
                self.codes.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
        return self.last(z + (code - z).detach())  # type: ignore[no-any-return]


def test_an_operation_without_a_twin_goes_to_the_buffers_that_it_uses() -> None:
    """Planned stages of a VQ-VAE were refused: evaluation read the codes where they are not written."""
    torch.manual_seed(0)
    train, evaluation = by_mode(capture(Codebook(), (torch.randn(2, 4),), prove=False))
    assert evaluation is not None
    graph, other = train.module, evaluation.module
    *_, operations = unit_ends(graph)
    ends = ends_in_both_modes(graph, operations, other)
    assert len(ends) > 1
    for end in ends:
        assignment = stage_assignment(graph, [end])
        check_shared_buffers(graph, assignment, other, matched_assignment(graph, assignment, other))


class Taught(nn.Module):
    """A teacher whose weights follow the student's in training."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student[0].weight, 0.1)
        return self.student(x) * self.teacher(x)  # type: ignore[no-any-return]


def test_a_plan_leaves_weights_that_forward_writes_to_on_one_stage_in_both_modes() -> None:
    train, evaluation = by_mode(capture(Taught(), (torch.randn(2, 4),), prove=False))
    assert evaluation is not None
    graph, other = train.module, evaluation.module
    *_, every = unit_ends(graph)
    ends = ends_in_both_modes(graph, every, other)
    assert ends

    def users(gm: GraphModule, stages: Mapping[str, int]) -> set[int]:
        nodes = gm.graph.find_nodes(op="get_attr", target="teacher.weight")
        return {stages[user.name] for node in nodes for user in node.users}

    for end in ends:
        assignment = stage_assignment(graph, [end])
        assert len(users(graph, assignment)) == 1
        assert users(other, matched_assignment(graph, assignment, other)) == users(graph, assignment)
