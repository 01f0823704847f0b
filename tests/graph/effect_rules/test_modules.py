"""What a call of a module does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph.making import effect_of, graph_of, names
from torch import nn
from torch.fx import Graph
from torch.nn.modules.module import register_module_forward_hook

from partita.graph.effect_rules.node_effect import NodeEffect


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def call(module: nn.Module) -> NodeEffect:
    root = nn.Module()
    root.m = module
    return effect_of("m", "a", root=root)


def test_a_linear_reads_its_weights_and_does_nothing_else() -> None:
    effect = call(nn.Linear(2, 2))
    assert not effect.observable
    assert len(effect.state) == 2


def test_batch_norm_writes_its_statistics_whatever_the_flag_says_now() -> None:
    module = nn.BatchNorm1d(2).eval()
    assert {id(tensor) for tensor in call(module).written_state} == {
        id(tensor) for tensor in module.buffers()
    }


@pytest.mark.parametrize(
    "make",
    [nn.Dropout, nn.RReLU, lambda: nn.LSTM(2, 2, 2, dropout=0.5), lambda: nn.TransformerEncoderLayer(4, 2)],
)
def test_dropout_is_random(make: Callable[[], nn.Module]) -> None:
    assert call(make()).random


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(2, 2), lambda: nn.MultiheadAttention(4, 2), nn.Identity, nn.Tanh, nn.ReLU]
)
def test_modules_without_dropout_draw_nothing(make: Callable[[], nn.Module]) -> None:
    assert not call(make()).random


@pytest.mark.parametrize(
    "make", [lambda: nn.ReLU(inplace=True), lambda: nn.Dropout(inplace=True), lambda: nn.SiLU(inplace=True)]
)
def test_in_place_modules_write_their_input(make: Callable[[], nn.Module]) -> None:
    assert names(call(make()).writes) == "a"


def test_an_embedding_with_max_norm_writes_its_weight() -> None:
    assert call(nn.Embedding(3, 2, max_norm=1.0)).written_state
    assert not call(nn.Embedding(3, 2)).written_state


def test_identity_hands_its_input_on() -> None:
    assert names(call(nn.Identity()).aliases) == "a"


def test_a_sequential_does_what_its_children_do() -> None:
    effect = call(nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(2), nn.Dropout()))
    assert names(effect.writes) == "a"
    assert effect.written_state
    assert effect.random
    assert not effect.host


def test_an_unknown_module_writes_its_input_and_its_state() -> None:
    effect = call(_Own())
    assert effect.unknown
    assert names(effect.writes) == "a"
    assert len(effect.written_state) == 1


def test_a_nested_graph_is_looked_into() -> None:
    inner = torch.fx.symbolic_trace(_Own())
    effect = call(inner)
    assert not effect.observable
    assert names(effect.aliases) == "a"


def test_a_nested_graph_that_writes_its_buffer_is_a_writer_of_that_buffer() -> None:
    root = nn.Module()
    root.register_buffer("steps", torch.zeros(()))

    def build(g: Graph) -> Any:
        x, steps = g.placeholder("x"), g.get_attr("steps")
        g.call_method("add_", (steps, 1))
        return g.call_function(operator.add, (x, steps))

    effect = call(graph_of(build, root))
    assert [id(tensor) for tensor in effect.written_state] == [id(root.steps)]
    assert not effect.writes


def test_a_nested_graph_that_sets_grad_mode_is_not_moved() -> None:
    def build(g: Graph) -> Any:
        g.call_function(torch._C._set_grad_enabled, (False,))
        return g.call_function(torch.sin, (g.placeholder("x"),))

    assert call(graph_of(build)).barrier


def test_a_module_with_a_hook_is_unknown() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *_: None)
    assert call(module).unknown


def test_a_hook_on_all_modules_makes_every_call_unknown() -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert call(nn.Linear(2, 2)).unknown
    finally:
        handle.remove()


def test_a_forward_that_was_replaced_on_the_instance_is_unknown() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x.add_(1)  # type: ignore[method-assign]
    assert call(module).unknown


def test_a_subclass_of_a_known_module_is_unknown() -> None:
    class Mine(nn.Linear):
        pass

    assert call(Mine(2, 2)).unknown
