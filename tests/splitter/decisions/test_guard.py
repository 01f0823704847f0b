"""Inputs that may share memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.splitter.graphs import by_name, graph_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import partita
from partita._torch.autograd.region_switches import SET_GRAD
from partita.errors import ExecutionError, OrderConflict
from partita.splitter import split_module
from partita.splitter.decisions.guard import require_distinct


def interleaved(with_metadata: bool = False) -> GraphModule:
    """x is written between two reads of y, which stand in one piece."""

    def build(g, x, y):
        first = g.call_function(torch.sin, (y,), name="first")
        g.call_method("add_", (x, 1.0), name="write")
        second = g.call_function(torch.cos, (y,), name="second")
        return first, second, x

    gm = graph_of(build, ("x", "y"))
    if with_metadata:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = torch.empty(2)
    return gm


KEYS = {"first": 0, "write": 1, "second": 0}


def guarded(gm: GraphModule) -> bool:
    return any(getattr(node.target, "__name__", "") == "require_distinct" for node in gm.graph.nodes)


def test_an_order_that_holds_for_shared_inputs_needs_no_check() -> None:
    keys = {"first": 0, "write": 1, "second": 2}
    cut = partita.split(interleaved(), keys)
    assert not guarded(cut.module)
    x = torch.ones(2)
    partita.verify(cut, interleaved(), (x, x)).check()
    partita.verify(cut, interleaved(), (x[:1], x)).check()


def test_a_conflict_only_of_shared_inputs_is_checked_at_run_time() -> None:
    gm = interleaved()
    cut = partita.split(gm, KEYS)
    assert [piece.name for piece in cut.pieces] == ["submod_0", "submod_1"]
    assert "no other input shares its memory" in str(cut.report)
    partita.verify(cut, gm, (torch.ones(2), torch.ones(2))).check()
    x = torch.ones(2)
    for module in (
        cut.module,
        split_module(gm, None, by_name(KEYS)),
        copy.deepcopy(cut.module),
        pickle.loads(pickle.dumps(cut.module)),
    ):
        module.graph.eliminate_dead_code()
        module.recompile()
        with pytest.raises(
            ExecutionError,
            match=r"inputs 'x' and 'y' share memory, and the graph writes 'x'.*pass a clone\(\)",
        ):
            module(x, x.view(2, 1))
        assert torch.equal(x, torch.ones(2))


def test_metadata_does_not_make_the_check_needless() -> None:
    """A graph that was traced with separate inputs can still be called with one tensor twice."""
    cut = partita.split(interleaved(with_metadata=True), KEYS)
    partita.verify(cut, interleaved(), (torch.ones(2), torch.ones(2))).check()
    x = torch.ones(2)
    with pytest.raises(ExecutionError, match="inputs 'x' and 'y' share memory"):
        cut.module(x, x)


def test_inputs_that_shared_memory_when_they_were_traced_may_share_it() -> None:
    def build(g, x, y, z):
        first = g.call_function(torch.sin, (z,), name="first")
        g.call_method("add_", (x, 1.0), name="write")
        second = g.call_function(torch.cos, (z,), name="second")
        return first, second, g.call_function(torch.neg, (y,), name="third")

    gm = graph_of(build, ("x", "y", "z"))
    mode = FakeTensorMode()
    x, z = mode.from_tensor(torch.ones(4)), mode.from_tensor(torch.ones(4))
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), (x, x.view(2, 2), z), strict=True):
        node.meta["val"] = value
    cut = partita.split(gm, {"first": 0, "write": 1, "second": 0, "third": 1})
    a, b = torch.ones(4), torch.ones(4)
    partita.verify(cut, gm, (a, a.view(2, 2), b)).check()
    with pytest.raises(ExecutionError, match="inputs 'x' and 'z' share memory"):
        cut.module(a, a.view(2, 2), a)


def test_containers_of_inputs_are_looked_into() -> None:
    x = torch.ones(2)
    require_distinct(("x", "y", "n"), 1, (x, [{"y": torch.ones(2)}], 3))
    with pytest.raises(ExecutionError, match="share memory"):
        require_distinct(("x", "y"), 1, (x, [{"y": x[1:]}]))


def test_a_conflict_that_holds_for_any_inputs_is_reported_without_the_doubtful_steps() -> None:
    def build(g, x, y):
        first = g.call_function(torch.sin, (x,), name="first")
        g.call_method("add_", (x, 1.0), name="write")
        second = g.call_function(torch.cos, (x,), name="second")
        return first, second, g.call_function(torch.neg, (y,), name="other")

    gm = graph_of(build, ("x", "y"))
    keys = {"first": 0, "write": 1, "second": 0, "other": 0}
    with pytest.raises(OrderConflict) as caught:
        partita.split(gm, keys)
    assert "other" not in caught.value.chain
    cut = partita.split(gm, keys, on_conflict="repair")
    assert not guarded(cut.module)
    x = torch.ones(2)
    partita.verify(cut, gm, (x, x)).check()


def test_the_check_holds_under_compile() -> None:
    cut = partita.split(interleaved(), KEYS)
    compiled = torch.compile(cut.module, backend="eager")
    x, y = torch.ones(2), torch.ones(2)
    assert torch.equal(compiled(x, y)[2], torch.full((2,), 2.0))
    with pytest.raises(ExecutionError, match="share memory"):
        compiled(x, x[:1])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(cut.module, backend="eager", fullgraph=True)(torch.ones(2), torch.ones(2))
    torch._dynamo.reset()


def writes_beside_state(with_metadata: bool = False) -> GraphModule:
    """x is written after w is read."""

    def build(g, x, y):
        early = g.call_function(torch.neg, (y,), name="early")
        read = g.call_function(torch.sin, (g.get_attr("w"),), name="read")
        g.call_method("add_", (x, 1.0), name="write")
        return early, g.call_function(torch.add, (read, y), name="late"), x

    gm = graph_of(build, ("x", "y"), {"w": torch.nn.Parameter(torch.ones(2))})
    for node in gm.graph.nodes:
        if with_metadata and node.op == "placeholder":
            node.meta["val"] = torch.empty(2)
    return gm


WRITE_FIRST = {"early": 0, "read": 1, "write": 0, "late": 1}


def test_an_input_that_is_the_models_own_tensor_is_refused_where_order_would_show() -> None:
    gm = writes_beside_state()
    cut = partita.split(gm, WRITE_FIRST)
    assert "no input is one of the model's own tensors" in str(cut.report)
    partita.verify(cut, gm, (torch.ones(2), torch.ones(2))).check()
    for module in (cut.module, split_module(gm, None, by_name(WRITE_FIRST)), copy.deepcopy(cut.module)):
        own = next(module.parameters())
        module.graph.lint()
        with (
            torch.no_grad(),
            pytest.raises(ExecutionError, match=r"input 'x' shares memory with '?.*of the model"),
        ):
            module(own, torch.ones(2))
        assert torch.equal(own, torch.ones(2))


def test_inputs_may_be_the_models_own_tensors_where_the_order_is_kept() -> None:
    gm = writes_beside_state()
    cut = partita.split(gm, {"early": 0, "read": 0, "write": 1, "late": 2})
    assert not any("require" in node.name for node in cut.module.graph.nodes)
    with torch.no_grad():
        results = []
        for module in (gm, cut.module):
            gm.w.fill_(1.0)
            results.append(module(gm.w, torch.ones(2))[1])
    assert torch.equal(*results)


def test_metadata_does_not_tell_inputs_from_the_models_tensors() -> None:
    gm = writes_beside_state(with_metadata=True)
    cut = partita.split(gm, WRITE_FIRST)
    assert cut.report.reordered
    partita.verify(cut, gm, (torch.ones(2), torch.ones(2))).check()
    with torch.no_grad(), pytest.raises(ExecutionError, match=r"input 'x' shares memory with"):
        cut.module(gm.w, torch.ones(2))


def test_the_callers_autocast_does_not_tell_uses_with_and_without_grad_apart() -> None:
    def build(g, x):
        early = g.call_function(torch.neg, (x,), name="early")
        w = g.get_attr("w")
        g.call_function(SET_GRAD, (False,))
        without = g.call_function(torch.mm, (x, w), name="without")
        g.call_function(SET_GRAD, (True,))
        with_grad = g.call_function(torch.mm, (early, w), name="with_grad")
        return without, with_grad

    gm = graph_of(build, ("x",), {"w": torch.nn.Parameter(torch.eye(2))})
    cut = partita.split(gm, {"early": 0, "without": 1, "with_grad": 0})
    assert cut.report.reordered
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gm(x)[1].requires_grad
        partita.verify(cut, gm, (x,)).check()
