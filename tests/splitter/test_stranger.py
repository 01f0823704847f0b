"""What a sceptical reader tried: graphs whose order can be seen in ways that no data edge shows. Each is
cut in every way into two pieces.
"""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.splitter.graphs import assignable, by_name, graph_of
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import partita
from partita._torch.operators.schemas import operator_facts
from partita.errors import ExecutionError
from partita.graph.effect_rules.functions import function_rule
from partita.splitter import split_module

X = torch.linspace(-1.0, 2.0, 16).reshape(4, 4)


def check(gm: GraphModule, *args: Any, train: bool = True) -> None:
    names = [node.name for node in assignable(gm)]
    for keys in itertools.product(range(2), repeat=len(names)):
        cut = partita.split(gm, dict(zip(names, keys, strict=True)), on_conflict="repair")
        partita.verify(cut, gm, args, backward=train, explain=False).check()


def test_views_in_a_trace_of_real_tensors_are_views() -> None:
    """``make_fx`` leaves values there that share no memory; they were believed, and a write to a view was
    missed.
    """

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = x + 1
        view = base.view(-1)
        early = base.cos()
        view.mul_(3)
        return early, base.sin()

    check(make_fx(model)(X), X)


def _rebound(g: Graph, x: Any) -> Any:
    a, b = g.call_method("clone", (x,)), g.call_function(torch.add, (x, 1.0))
    g.call_method("set_", (b, a))
    g.call_method("add_", (a, 1.0))
    return g.call_function(torch.sin, (b,)), g.call_function(torch.cos, (a,))


def _backward(g: Graph, x: Any) -> Any:
    total = g.call_method("sum", (g.call_function(torch.mul, (x, x)),))
    before = g.call_function(getattr, (x, "grad"))
    g.call_method("backward", (total,))
    return before, g.call_function(getattr, (x, "grad"))


def _context(g: Graph, x: Any) -> Any:
    context = g.call_function(torch.no_grad)
    g.call_method("__enter__", (context,))
    inside = g.call_function(torch.cos, (x,))
    g.call_method("__exit__", (context, None, None, None))
    return inside, g.call_function(torch.tan, (x,))


def _default_type(g: Graph, x: Any) -> Any:
    g.call_function(torch.set_default_tensor_type, ("torch.DoubleTensor",))
    inside = g.call_function(torch.zeros, (2,))
    g.call_function(torch.set_default_tensor_type, ("torch.FloatTensor",))
    return x, inside, g.call_function(torch.zeros, (2,))


def _dropout_that_does_not_say(g: Graph, x: Any) -> Any:
    dropout = torch.ops.aten.native_dropout.default
    return g.call_function(dropout, (x, 0.5, None)), g.call_function(dropout, (x, 0.5, None))


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type")
@pytest.mark.parametrize("build", [_rebound, _backward, _context, _default_type, _dropout_that_does_not_say])
def test_what_changes_behind_the_values_keeps_its_order(build: Callable[..., Any]) -> None:
    check(graph_of(build), X.clone().requires_grad_(build is not _rebound), train=False)


def test_a_list_of_the_model_is_state() -> None:
    root = nn.Module()
    root.cache = []

    def build(g: Graph, x: Any) -> Any:
        first = g.call_function(len, (g.get_attr("cache"),))
        g.call_method("append", (g.get_attr("cache"), x))
        return first, g.call_function(len, (g.get_attr("cache"),))

    check(graph_of(build, root=root), X)


def _iterator(g: Graph, x: Any) -> Any:
    items = g.call_function(enumerate, (x,))
    return g.call_function(list, (items,)), g.call_function(list, (items,))


def _sort(g: Graph, x: Any) -> Any:
    first = g.call_function(operator.getitem, (x, 0))
    g.call_method("sort", (x,))
    return first, g.call_function(operator.getitem, (x, 0))


def _add(g: Graph, x: Any) -> Any:
    items = g.call_function(set, (x,))
    first = g.call_function(len, (items,))
    g.call_method("add", (items, 9))
    return first, g.call_function(len, (items,))


@pytest.mark.parametrize("build", [_iterator, _sort, _add])
def test_containers_that_change_keep_their_order(build: Callable[..., Any]) -> None:
    check(graph_of(build), [3, 1, 2])


def test_in_place_operators_on_numbers_mean_what_generated_code_means() -> None:
    """``n += 3`` binds ``n`` anew for the nodes behind, and ``x[0] = 1`` has ``x`` as its value."""

    def build(g: Graph, x: Any) -> Any:
        n = g.call_method("size", (x, 0))
        more = g.call_function(operator.iadd, (n, 3))
        most = g.call_function(operator.iadd, (n, 4))
        written = g.call_function(operator.setitem, (x, 0, 1.0))
        return n, more, most, g.call_function(torch.sin, (written,))

    gm = graph_of(build)
    assert gm(X)[:3] == (11, 7, 11)
    check(gm, X)
    keys = {node.name: number for number, node in enumerate(assignable(gm))}
    for module in (split_module(gm, None, by_name(keys)), partita.split(gm, dict.fromkeys(keys, 0)).module):
        partita.verify(module, gm, (X,)).check()
        module.recompile()
        partita.verify(module, gm, (X,)).check()


def test_a_graph_called_with_one_tensor_twice_is_refused_where_it_was_traced_with_two() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            early = x.exp()
            y.add_(1)
            return early, x.sin(), y

    gm = torch.export.export(Model(), (torch.ones(4), torch.ones(4))).module()
    cut = partita.split(gm, {"_guards_fn": 0, "exp": 0, "add_": 1, "sin": 0})
    partita.verify(cut, gm, (torch.ones(4), torch.ones(4))).check()
    x = torch.ones(4)
    with pytest.raises(ExecutionError, match=r"inputs 'y' and 'x' share memory, and the graph writes 'y'"):
        cut.module(x, x)


def test_hooks_of_the_whole_stay_with_it() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.cos(torch.sin(x)))
    gm.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    gm.register_forward_hook(lambda module, args, output: output * 2)
    gm.register_full_backward_hook(lambda module, gradients, taken: tuple(value * 3 for value in gradients))
    x = X.clone().requires_grad_()
    for module in (partita.split(gm, {"sin": 0, "cos": 1}).module, split_module(gm, None, lambda node: 0)):
        partita.verify(module, gm, (x,)).check()
        gradients = [torch.autograd.grad(one(x).sum(), x)[0] for one in (module, gm)]
        assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check_guards", [True, False])
def test_an_exported_program_still_refuses_inputs_that_it_does_not_fit(check_guards: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x.sin() * n

    sizes = ({0: torch.export.Dim("b", min=2, max=32)}, None)
    program = torch.export.export(Model(), (torch.ones(6, 2), 3), dynamic_shapes=sizes)
    gm = program.module(check_guards=check_guards)
    module = partita.split(gm, lambda node: 0).module
    for args in ((torch.ones(40, 2), 3), (torch.ones(8, 3), 3), (torch.ones(8, 2), 4), (torch.ones(8, 2),)):
        for same in (module, copy.deepcopy(module)):
            result = partita.verify(same, gm, args, backward=False).check()
            assert result.raised
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again(torch.ones(8, 2), 3), gm(torch.ones(8, 2), 3))
    with pytest.raises(ValueError, match="Trying to flatten user inputs"):
        again(torch.ones(8, 2))


def test_collectives_and_operators_with_effects_keep_their_order() -> None:
    for operation in (torch.ops._c10d_functional.all_reduce.default, torch.ops.aten._print.default):
        rule = function_rule(operation)
        assert rule is not None
        assert rule(Graph().create_node("call_function", operation, ("text",), {})).host
    assert not operator_facts(torch.ops.aten.sin.default)[0].ordered
