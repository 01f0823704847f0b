"""What a graph module does around a call of its graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx import Graph

from partita._torch.autograd.region_switches import SET_GRAD
from partita._torch.distributed.fsdp_marks import mark
from partita._torch.graph_module import lazy_module as module_under_test
from partita._torch.graph_module.lazy_module import LazyGraphModule, lazy_module


def _negative() -> LazyGraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.neg, (x,)))
    return lazy_module(graph, "Negative", training=True)


def test_a_module_without_regions_never_looks_for_open_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose ``forward`` was replaced (a compiled stage) did so at each call, since its code never ran."""
    monkeypatch.setattr(module_under_test, "OpenRegions", None)
    replaced: Any = _negative()
    replaced.forward = torch.neg
    for module in (_negative(), copy.deepcopy(_negative()), replaced):
        assert module(torch.ones(())) == -1


def _failing(*, without_gradients: bool) -> LazyGraphModule:
    graph = Graph()
    if without_gradients:
        graph.call_function(SET_GRAD, (False,))
    graph.output(graph.call_function(torch.zeros, ("no size",)))
    return lazy_module(graph, "Failing", training=True)


def test_a_region_that_an_error_left_open_is_closed_by_a_copy_and_after_a_change_too() -> None:
    module = copy.deepcopy(_failing(without_gradients=True))
    changed = _failing(without_gradients=False)
    with pytest.raises(TypeError):
        changed()
    with changed.graph.inserting_before(next(iter(changed.graph.nodes))):
        changed.graph.call_function(SET_GRAD, (False,))
    changed.recompile()
    for one in (module, changed):
        with pytest.raises(TypeError):
            one()
        assert torch.is_grad_enabled()


def test_each_name_that_a_module_lists_can_be_read() -> None:
    """Torch reads them all under the stance ``eager_then_compile``, which ended in an ``AttributeError``."""
    module = lazy_module(Graph(), "Listed", training=True)
    module.graph.output(())
    missing = [name for name in dir(module) if not name.startswith("_") and not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("ran", [False, True])
def test_dynamo_compiles_each_of_many_modules_once_and_as_one_graph(*, ran: bool) -> None:
    """Torch 2.14 traced what generates code, and graphs of equal structure share a limit of compiles."""
    x = torch.randn(3)
    modules = [_negative() for _ in range(10)]
    if ran:
        assert all(torch.equal(module(x), -x) for module in modules)
    torch.compiler.reset()
    for module in modules:
        counter = CompileCounter()
        compiled: Any = torch.compile(module, backend=counter, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(x), -x)
        assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.parametrize("container", [nn.ModuleList, list])
def test_dynamo_compiles_more_modules_than_it_would_begin_anew_for(
    container: Callable[[list[LazyGraphModule]], Iterable[nn.Module]],
) -> None:
    """It gives up after a hundred times."""
    modules = container([_negative() for _ in range(120)])

    def in_turn(x: torch.Tensor) -> torch.Tensor:
        for module in modules:
            x = module(x)
        return x

    x = torch.randn(3)
    torch.compiler.reset()
    assert torch.equal(torch.compile(in_turn, backend="eager", fullgraph=True)(x), x)
    torch.compiler.reset()


def test_dynamo_compiles_modules_that_it_does_not_ask_for_their_parameters() -> None:
    """It asks none that FSDP manages, and none that has a ``named_parameters`` of its own: it ended in
    "marked as skipped".
    """
    managed, own = nn.Sequential(_negative(), _negative()), _negative()
    for module in managed.modules():
        mark(module, use_orig_params=True)
    own.named_parameters = MethodType(lambda *_, **__: iter(()), own)
    assert type(own).named_parameters is nn.Module.named_parameters
    torch.compiler.reset()
    compiled: Any = torch.compile(lambda x: own(managed(x)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), -torch.ones(3))
    torch.compiler.reset()


def test_dynamo_traces_what_asks_a_module_for_its_parameters() -> None:
    module = _negative()
    module.register_parameter("unused", nn.Parameter(torch.ones(())))
    torch.compiler.reset()
    compiled: Any = torch.compile(
        lambda x: (
            sum(p.sum() for p in module.parameters()) + len(dict(module.named_parameters())) + module(x)
        ),
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3))
    torch.compiler.reset()


def test_a_region_that_an_error_left_open_is_closed_while_another_thread_compiles() -> None:
    failing = _failing(without_gradients=True)

    def has_gradients_after_an_error() -> bool:
        with pytest.raises(TypeError):
            failing()
        return torch.is_grad_enabled()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(has_gradients_after_an_error).result()
        return gm.forward

    torch.compiler.reset()
    assert torch.compile(torch.neg, backend=backend)(torch.ones(())) == -1
    torch.compiler.reset()


def test_modules_are_compiled_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What generates the code was compiled with each, up to torch's limit; the others ran as they were."""
    x = torch.randn(3)
    torch.compiler.reset()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as all threads see it meanwhile
    for _ in range(10):
        compiled: Any = torch.compile(_negative(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), -x)
    torch.compiler.reset()
