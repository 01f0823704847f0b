"""The functions that switch regions, and autocast's cache."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from tests.traced_regions import need_traced_regions
from torch.fx import Graph, symbolic_trace

from partita._torch.autograd import global_settings as ambient
from partita._torch.autograd import region_switches as regions
from partita._torch.autograd.region_switches import (
    EMPTY_CACHE,
    ENTER_AUTOCAST,
    ENTER_CACHE_SCOPE,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    LEAVE_CACHE_SCOPE,
    SET_GRAD,
    OpenRegions,
    is_barrier_function,
    level_change,
)
from partita._torch.graph_module.lazy_module import lazy_module
from partita.capture import capture
from partita.pipelining import SplitPoint, pipeline


class _Weight:
    """A weight, and whether autocast converts it anew."""

    def __init__(self) -> None:
        self.weight = torch.ones(2, 2, requires_grad=True)

    def converted(self) -> torch.Tensor:
        """The copy that autocast hands to a matmul, seen in the graph of its gradient."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = torch.matmul(torch.ones(2, 2), self.weight)
        inputs = [function for function, _ in product.grad_fn.next_functions if function is not None]  # type: ignore[union-attr]
        return inputs[0]  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _balanced() -> Iterator[None]:
    yield
    assert regions._SCOPES.open == 0
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


def test_a_scope_keeps_converted_weights_between_regions() -> None:
    weight = _Weight()
    assert weight.converted() is not weight.converted()
    scope = ENTER_CACHE_SCOPE()
    assert weight.converted() is weight.converted()
    LEAVE_CACHE_SCOPE(scope)


def test_a_scope_that_an_exception_skips_is_closed_with_its_frame() -> None:
    def fails() -> None:
        scope = ENTER_CACHE_SCOPE()
        torch.ones(2).reshape(3)
        LEAVE_CACHE_SCOPE(scope)

    with pytest.raises(RuntimeError, match="invalid for input"):
        fails()  # the fixture checks what is left behind


def test_emptying_forgets_what_only_our_scopes_keep() -> None:
    weight = _Weight()
    scope = ENTER_CACHE_SCOPE()
    before = weight.converted()
    EMPTY_CACHE()
    assert weight.converted() is not before
    LEAVE_CACHE_SCOPE(scope)


def test_emptying_leaves_the_callers_cache_alone() -> None:
    weight = _Weight()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = weight.converted()
        scope = ENTER_CACHE_SCOPE()
        EMPTY_CACHE()
        assert weight.converted() is before
        LEAVE_CACHE_SCOPE(scope)
        assert weight.converted() is before


@pytest.mark.parametrize(
    "function",
    [
        torch.set_default_dtype,
        torch.use_deterministic_algorithms,
        torch.autocast_increment_nesting,
        torch._C._functorch._vmap_increment_nesting,
        torch._C._autograd._saved_tensors_hooks_enable,
        torch.nn.attention._sdpa_kernel,
    ],
)
def test_setters_of_global_state_are_barriers(function: object) -> None:
    assert is_barrier_function(function)


@pytest.mark.parametrize("function", [torch.sin, torch.is_grad_enabled, print, torch.get_default_dtype])
def test_other_functions_are_not(function: object) -> None:
    assert not is_barrier_function(function)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("looked_at", [False, True])
def test_an_error_leaves_no_region_of_a_graph_open(inference: bool, looked_at: bool) -> None:
    """A batch that is skipped would leave all that follow without gradients, or in half precision."""
    g = Graph()
    x, rows = g.placeholder("x"), g.placeholder("rows")
    g.call_function(SET_GRAD, (False,))
    mode = g.call_function(ENTER_INFERENCE, (True,)) if inference else None
    cast = g.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, False))
    y = g.call_method("reshape", (x, rows, -1))
    g.call_function(EXIT_AUTOCAST, (cast,))
    if mode is not None:
        g.call_function(EXIT_INFERENCE, (mode,))
    g.call_function(SET_GRAD, (True,))
    g.output(y)
    module = lazy_module(g, "Fails", training=True)
    if looked_at:  # then it runs the code that torch generates
        assert "reshape" in module.code
    before = ambient.capture()
    with pytest.raises(RuntimeError, match="invalid"):
        module(torch.ones(4), 3)
    assert ambient.capture() == before
    assert module(torch.ones(4), 2).shape == (2, 2)
    assert ambient.capture() == before


def test_regions_within_regions_are_left_in_reverse_order() -> None:
    g = Graph()
    x = g.placeholder("x")
    outer = g.call_function(ENTER_INFERENCE, (True,))
    inner = g.call_function(ENTER_INFERENCE, (False,))
    y = g.call_method("reshape", (x, 3))
    g.call_function(EXIT_INFERENCE, (inner,))
    g.call_function(EXIT_INFERENCE, (outer,))
    g.output(y)
    before = ambient.capture()
    with pytest.raises(RuntimeError, match="invalid"):
        lazy_module(g, "Nested", training=True)(torch.ones(4))
    assert ambient.capture() == before


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.two(i) + self.one(x)


def test_an_error_in_a_cut_model_leaves_no_region_open_and_keeps_nothing_alive() -> None:
    """Not even where the user keeps the exception: a scope of autocast's cache that stayed open would give
    the user's own regions converted weights of before.
    """
    points = {"two": SplitPoint.BEGINNING}
    pipe = pipeline(_Model(), (torch.ones(2, 4), torch.tensor([0, 1])), split_spec=points)
    before = ambient.capture()
    inputs = torch.ones(2, 4)
    gc.disable()
    try:
        with pytest.raises(IndexError) as kept:
            pipe(inputs, torch.tensor([0, 9]))
        assert ambient.capture() == before
        assert regions._SCOPES.open == 0
        assert kept.value.__traceback__ is not None
        alive = weakref.ref(inputs)
        del inputs, kept
        assert alive() is None
    finally:
        gc.enable()


def test_a_cut_model_with_regions_can_be_traced_anew() -> None:
    class Variadic(_Model):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(*inputs)

    points = {"two": SplitPoint.BEGINNING}
    pipe = pipeline(Variadic(), (torch.ones(2, 4), torch.tensor([0, 1])), split_spec=points)
    assert isinstance(symbolic_trace(pipe.split_gm), torch.fx.GraphModule)


class _Regions(torch.nn.Module):
    def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        with torch.no_grad():
            y = x + 1
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                return y.reshape(rows, -1)


def test_regions_are_compiled_in_one_piece() -> None:
    need_traced_regions()
    module = capture(_Regions(), (torch.ones(4), 2)).module
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4), 2), _Regions()(torch.ones(4), 2))


def test_an_error_in_a_compiled_graph_leaves_no_region_open_where_it_breaks() -> None:
    need_traced_regions()

    def told(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.reshape(3)

    g = Graph()
    x = g.placeholder("x")
    g.call_function(SET_GRAD, (False,))
    cast = g.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, False))
    y = g.call_function(told, (x,))
    g.call_function(EXIT_AUTOCAST, (cast,))
    g.call_function(SET_GRAD, (True,))
    g.output(y)
    compiled = torch.compile(lazy_module(g, "Breaks", training=True), backend="eager")
    before = ambient.capture()
    with pytest.raises(RuntimeError, match="invalid"):
        compiled(torch.ones(4))
    assert ambient.capture() == before


def test_graphs_that_are_compiled_do_not_count_against_each_other() -> None:
    """They share a ``__call__``; Dynamo compiles the code of a function eight times at the most."""
    for number in range(10):
        g = Graph()
        x = g.placeholder("x")
        g.call_function(SET_GRAD, (False,))
        y = g.call_function(torch.add, (x, number))
        g.call_function(SET_GRAD, (True,))
        g.output(y)
        module = torch.compile(lazy_module(g, "Adds", training=True), backend="eager", fullgraph=True)
        assert float(module(torch.zeros(()))) == number


def test_a_tracer_does_not_see_that_regions_are_looked_at_and_put_back() -> None:
    """It would record that as a call of the model's own."""
    seen: list[object] = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Sees():
        OpenRegions.now().put_back()
    assert not seen


def test_levels_of_torch_func_are_opened_and_closed() -> None:
    gm = torch.export.export(_Mapped(), (torch.ones(2, 3),)).module()
    changes = [level_change(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert [change for change in changes if change] == [1, -1]
    assert level_change(SET_GRAD) == level_change(torch.autocast_increment_nesting) == 0


class _Mapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.sin)(x)
