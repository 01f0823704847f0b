"""Which grad mode, inference mode and autocast region holds at each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph.making import graph_of
from torch.fx import Graph, Node

from partita._torch.autograd.region_switches import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD,
)
from partita.errors import RegionError
from partita.graph.effects import analyse
from partita.graph.regions import INHERITED, Ambient, ambient_states


def states(build: Callable[[Graph], Any]) -> tuple[dict[str, Ambient], Ambient]:
    """The state at each node by name, and the one that is left behind."""
    effects = analyse(graph_of(build))
    runs, final = ambient_states(effects.nodes, effects.regions)
    states_by_node = {}
    for number, (start, state) in enumerate(runs):
        end = runs[number + 1][0] if number + 1 < len(runs) else len(effects.nodes)
        states_by_node.update((node.name, state) for node in effects.nodes[start:end])
    return states_by_node, final


def autocast(g: Graph, enabled: bool = True) -> Node:
    return g.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, enabled, True))


def leave(g: Graph, entered: Any) -> Node:
    return g.call_function(EXIT_AUTOCAST, (entered,))


def test_a_graph_without_switches_has_one_state() -> None:
    effects = analyse(graph_of(lambda g: g.call_function(torch.sin, (g.placeholder("x"),))))
    assert ambient_states(effects.nodes, effects.regions) == ([(0, INHERITED)], INHERITED)


def test_grad_mode_holds_from_its_switch_on_and_is_left_behind() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        sin = g.call_function(torch.sin, (x,))
        g.call_function(SET_GRAD, (False,))
        return g.call_function(torch.cos, (sin,))

    states_by_node, final = states(build)
    assert states_by_node["sin"] is INHERITED
    assert states_by_node["cos"].grad is not None
    assert states_by_node["cos"].grad.args == (False,)
    assert final == states_by_node["cos"]


def test_regions_nest() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        outer = autocast(g)
        a = g.call_function(torch.sin, (x,))
        inner = autocast(g, enabled=False)
        b = g.call_function(torch.cos, (a,))
        leave(g, inner)
        c = g.call_function(torch.tan, (b,))
        leave(g, outer)
        return g.call_function(torch.exp, (c,))

    states_by_node, final = states(build)
    assert [len(states_by_node[name].stack) for name in ("sin", "cos", "tan", "exp")] == [1, 2, 1, 0]
    assert states_by_node["sin"].stack == states_by_node["tan"].stack
    assert final == INHERITED


def test_inference_mode_hides_the_grad_mode_around_it_and_gives_it_back() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        g.call_function(SET_GRAD, (False,))
        entered = g.call_function(ENTER_INFERENCE, (False,))
        a = g.call_function(torch.sin, (x,))
        g.call_function(SET_GRAD, (True,))
        b = g.call_function(torch.cos, (a,))
        g.call_function(EXIT_INFERENCE, (entered,))
        return g.call_function(torch.tan, (b,))

    states_by_node, _ = states(build)
    assert states_by_node["sin"].grad is None
    assert states_by_node["cos"].grad is not None
    assert states_by_node["cos"].grad.args == (True,)
    assert states_by_node["tan"].grad is states_by_node["sin"].outside[0]
    assert states_by_node["tan"].grad is not None
    assert states_by_node["tan"].grad.args == (False,)
    assert {switch.name for switch in states_by_node["cos"].switches} == {
        "_set_grad_enabled",
        "_set_grad_enabled_1",
        "_enter_inference_mode",
    }


def test_autocast_does_not_touch_grad_mode() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        entered = autocast(g)
        g.call_function(SET_GRAD, (False,))
        leave(g, entered)
        return g.call_function(torch.sin, (x,))

    assert states(build)[0]["sin"].grad is not None


def _never_left(g: Graph) -> Any:
    x = g.placeholder("x")
    autocast(g)
    return x


def _left_twice(g: Graph) -> Any:
    x = g.placeholder("x")
    entered = autocast(g)
    leave(g, entered)
    leave(g, entered)
    return x


def _crossed(g: Graph) -> Any:
    x = g.placeholder("x")
    outer, _inner = autocast(g), autocast(g)
    leave(g, outer)
    return x


def _of_nothing(g: Graph) -> Any:
    x = g.placeholder("x")
    leave(g, x)
    return x


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_never_left, "the graph enters '_enter_autocast' and never leaves: add the matching exit"),
        (
            _left_twice,
            "'_exit_autocast_1' leaves the region of '_enter_autocast', which is not open there: was it left",
        ),
        (
            _crossed,
            "of '_enter_autocast' while '_enter_autocast_1' inside it is still open: regions must nest",
        ),
        (_of_nothing, "leaves a region but names no node that entered one: got x"),
    ],
)
def test_a_region_that_is_not_left_properly_is_refused(build: Callable[[Graph], Any], message: str) -> None:
    with pytest.raises(RegionError, match=message):
        states(build)
