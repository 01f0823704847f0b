"""Layouts, cuts, tables, and what ``replicate`` refuses: in one process."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ddp import models
from tests.ddp.models import batch, loss_of, seeded
from torch import nn
from torch.fx import Graph, GraphModule

from partita.ddp import replicate
from partita.ddp.agreement import GraphPrint
from partita.ddp.backend import partita_ddp
from partita.ddp.cutting import BackwardGraph, cut_backward
from partita.ddp.inner import resolve_inner
from partita.ddp.layout import lay_out
from partita.ddp.listing import BucketRow, bucket_rows, bucket_table
from partita.ddp.program import program_of
from partita.ddp.reduction import BucketMemory
from partita.ddp.tuning import measure_links
from partita.errors import ExecutionError, PlanError, UsageError
from partita.planning import BucketPlan
from partita.runtime import InProcessWorld, Tracer


def alone(function: Any, *args: Any) -> Any:
    """Run with a comm of one rank."""
    return InProcessWorld(1).run(function, *args)[0]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    wide=st.lists(st.booleans(), min_size=12, max_size=12),
    cap=st.integers(1, 300),
)
def test_every_parameter_has_one_place_in_a_bucket_of_its_kind(
    sizes: list[int], wide: list[bool], cap: int
) -> None:
    tensors = [
        torch.zeros(size, dtype=torch.float64 if is_wide else torch.float32)
        for size, is_wide in zip(sizes, wide, strict=False)
    ]
    names = [f"p{index}" for index in range(len(tensors))]
    order = list(reversed(range(len(tensors))))
    buckets = lay_out(names, tensors, order, cap_bytes=cap)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == sorted(order)
    for number, bucket in enumerate(buckets):
        assert bucket.number == number
        assert {tensors[slot.index].dtype for slot in bucket.slots} == {bucket.dtype}
        assert bucket.elements == sum(tensors[slot.index].numel() for slot in bucket.slots)
        without_last = sum(tensors[slot.index].nbytes for slot in bucket.slots[:-1])
        assert without_last < cap
        offsets = [slot.offset for slot in bucket.slots]
        assert offsets == sorted(offsets)


def test_a_plan_decides_the_buckets_and_kinds_are_kept_apart() -> None:
    tensors = [torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    plan = BucketPlan((("c", "a"), ("b",)), (24, 8), (0.0, 0.0), (0.0, 0.0), 0.0)
    buckets = lay_out(["a", "b", "c"], tensors, [2, 1, 0], cap_bytes=1, plan=plan)
    assert [bucket.names for bucket in buckets] == [("c",), ("a",), ("b",)]


def test_a_plan_for_another_model_is_refused() -> None:
    plan = BucketPlan((("x",),), (8,), (0.0,), (0.0,), 0.0)
    with pytest.raises(PlanError, match="names 'x', which is no trainable parameter"):
        lay_out(["a"], [torch.zeros(2)], [0], cap_bytes=1, plan=plan)
    plan = BucketPlan((("a",),), (8,), (0.0,), (0.0,), 0.0)
    with pytest.raises(PlanError, match="leaves out 1 of 2 parameters, 'b' among them"):
        lay_out(["a", "b"], [torch.zeros(2)] * 2, [0, 1], cap_bytes=1, plan=plan)


def test_memory_is_used_again_unless_somebody_keeps_a_part_of_it() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    (layout,) = lay_out(["a"], [parameter], [0], cap_bytes=1)
    memory = BucketMemory(layout)
    first = memory.take([parameter]).data_ptr()
    assert memory.take([parameter]).data_ptr() == first
    parameter.grad = memory.take([parameter])[:4]
    assert memory.take([parameter]).data_ptr() == first
    kept = parameter.grad
    parameter.grad = None
    assert memory.take([parameter]).data_ptr() != first
    assert kept.data_ptr() == first


def backward_graph() -> GraphModule:
    """Three gradients; a transposed weight that only the last one needs stands first."""
    graph = Graph()
    weight, tangent = graph.placeholder("weight"), graph.placeholder("tangent")
    turned = graph.call_function(torch.ops.aten.t.default, (weight,))
    third = graph.call_function(torch.ops.aten.sin.default, (tangent,))
    middle = graph.call_function(torch.ops.aten.cos.default, (third,))
    second = graph.call_function(torch.ops.aten.neg.default, (middle,))
    first = graph.call_function(torch.ops.aten.mm.default, (turned, second))
    graph.output((first, None, second, third, tangent))
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.zeros(2, 2, device="meta")
    return GraphModule(nn.Module(), graph)


def test_a_backward_graph_is_cut_after_each_bucket_and_work_is_done_where_it_is_needed() -> None:
    gm = backward_graph()
    cut = cut_backward(BackwardGraph(gm), {0: "late", 2: "middle", 3: "early"})
    assert cut is not None
    assert [piece.node_names for piece in cut.pieces] == [
        ("sin_default",),
        ("cos_default", "neg_default"),
        ("t_default", "mm_default"),
    ]
    assert cut_backward(BackwardGraph(gm), {0: "all", 2: "all", 3: "all"}) is None


def test_gradients_come_out_as_soon_as_their_piece_has_run() -> None:
    gm = backward_graph()
    log: list[Any] = []

    def compile_piece(key: str, piece: GraphModule) -> Any:
        def run(values: list[Any]) -> Any:
            log.append("piece")
            taken = list(values)
            values.clear()
            return piece(*taken)

        return run

    def deliver(position: int, value: torch.Tensor) -> torch.Tensor | None:
        log.append(position)
        return value if position == 0 else None

    x = torch.randn(2, 2)
    expected = gm(x, x)
    for buckets in ({0: 0, 2: 1, 3: 2}, {0: 0}):
        log.clear()
        program = program_of(gm, cut_backward(BackwardGraph(gm), buckets), compile_piece)
        given = [x, x]
        results = program.run(given, deliver)
        assert not given
        assert torch.equal(results[0], expected[0])
        assert results[1:] == [None] * 4
    assert log == [4, "piece", 3, 2, 0]


def test_the_table_shows_what_is_known() -> None:
    tensors = [torch.zeros(300), torch.zeros(2)]
    buckets = lay_out(["a", "b"], tensors, [0, 1], cap_bytes=1000)
    rows = bucket_rows(buckets, None)
    assert rows == (BucketRow(0, ("a",), 1200, "float32"), BucketRow(1, ("b",), 8, "float32"))
    text = bucket_table([*rows, BucketRow(2, tuple("cdefg"), 5, "float64", 0.001, 0.002, 0.0035)])
    assert "1,200" in text
    assert "3.50 ms  c, d, e and 2 more (float64)" in text


def test_two_prints_say_where_they_differ() -> None:
    one = GraphPrint(("a", "b"), (("mm", 2),))
    assert "the gradient of 'b'" in one.difference(GraphPrint(("a",), (("mm", 2),)))
    assert "operator mm stands 2 times" in one.difference(GraphPrint(("a", "b"), (("mm", 3),)))
    assert "another order" in one.difference(GraphPrint(("b", "a"), (("mm", 2),)))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {"bucket_cap_mb": 0}, "bucket_cap_mb is 0: give a size above 0"),
        (lambda: nn.Linear(2, 2), {"initial": "guess"}, "initial is 'broadcast' or 'check', got 'guess'"),
        (lambda: nn.Linear(2, 2), {"ignored": ["x"]}, "ignored names 'x', which the module does not have"),
        (lambda: nn.Linear(2, 2), {"inner": "fast"}, "inner is 'inductor', 'aot_eager', a PieceRunner, or a"),
        (nn.ReLU, {}, "no parameter that requires a gradient"),
        (lambda: nn.Embedding(3, 2, sparse=True), {}, "'weight' has sparse gradients, and buckets are dense"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, "'weight' is on the meta device"),
        (lambda: nn.LazyLinear(2), {}, "'weight' has no shape yet"),
        (lambda: torch.compile(nn.Linear(2, 2)), {}, "compiled already: replicate it first"),
    ],
)
def test_what_can_not_be_replicated_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    def body(comm: Any) -> None:
        with pytest.raises(UsageError, match=message):
            replicate(make(), comm, **options)

    alone(body)


def test_a_module_is_replicated_once() -> None:
    def body(comm: Any) -> None:
        inner = nn.Linear(2, 2)
        module = replicate(inner, comm)
        with pytest.raises(UsageError, match="replicated already"):
            replicate(module, comm)
        with pytest.raises(UsageError, match=r"'0.weight' belongs to a replicated module already"):
            replicate(nn.Sequential(inner), comm)

    alone(body)


def test_sparse_gradients_from_elsewhere_are_refused_by_name() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(lambda: nn.Embedding(5, 3)), comm)
        nn.functional.embedding(torch.tensor([1]), module.weight, sparse=True).sum().backward()

    with pytest.raises(ExecutionError, match="the gradient of 'weight' is sparse"):
        alone(body)


def test_a_parameter_that_is_trained_later_is_an_error() -> None:
    def body(comm: Any) -> None:
        plain = seeded(models.mlp)
        plain[0].weight.requires_grad_(False)
        module: Any = replicate(plain, comm)
        module[0].weight.requires_grad_(True)
        with pytest.raises(ExecutionError, match=r"'0.weight' was frozen when the module was replicated"):
            module(batch(0, 0))

    alone(body)


def test_a_plan_needs_measurements() -> None:
    def body(comm: Any) -> None:
        module = replicate(seeded(models.mlp), comm)
        with pytest.raises(PlanError, match="there is no measurement of 10 of 10 parameters"):
            module.replication.plan()
        assert measure_links(comm).ranks == 1

    alone(body)


def test_copies_and_pickles_are_plain_modules() -> None:
    def body(comm: Any) -> None:
        plain = seeded(models.WithUnused)
        names = list(plain.state_dict())
        module: Any = replicate(plain, comm)
        assert module is plain
        assert isinstance(module, models.WithUnused)
        assert list(module.state_dict()) == names
        copied = copy.deepcopy(module)
        assert type(copied) is models.WithUnused
        loss_of(copied(batch(0, 0))).backward()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)) is models.WithUnused
        assert "bucket" in str(module.replication)

    alone(body)


def test_a_second_gradient_after_its_bucket_was_sent_is_an_error_unless_announced() -> None:
    def body(comm: Any, late: tuple[str, ...]) -> None:
        module: Any = replicate(seeded(models.mlp), comm, bucket_cap_mb=0.0001, inner="aot_eager", late=late)
        run = torch.compile(module, backend=partita_ddp)
        for step in range(3):
            loss_of(run(batch(step, 0))).backward()
        (loss_of(run(batch(3, 0))) + module[0].weight.square().sum()).backward()

    alone(body, ("0.weight",))
    with pytest.raises(ExecutionError, match=r"'0.weight' got another gradient after its bucket"):
        alone(body, ())


def test_buckets_are_in_the_log_and_in_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(0)

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, bucket_cap_mb=0.001, tracer=tracer)
        loss_of(module(batch(0, 0))).backward()

    with caplog.at_level(logging.INFO, "partita.ddp"):
        alone(body)
    assert "exposed  parameters" in caplog.text
    assert "8.bias" in caplog.text
    reduced = [event for event in tracer.events if event.category == "reduce"]
    assert [event.name for event in reduced][:2] == ["bucket 0", "bucket 1"]
    assert reduced[0].args["bytes"] >= 1048


def test_after_close_the_module_trains_alone() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm)
        module.replication.close()
        assert type(module) is nn.Sequential
        loss_of(module(batch(0, 0))).backward()
        assert module[0].weight.grad is not None

    alone(body)


def test_unknown_options_of_the_backend_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown option 'outer': partita_ddp takes inner"):
        partita_ddp(GraphModule(nn.Module(), Graph()), [], options={"outer": 1})
    with pytest.raises(UsageError, match=r"inner is 'inductor'"):
        resolve_inner("cuda")


def test_a_graph_without_replicated_parameters_is_compiled_as_it_is() -> None:
    model = seeded(models.mlp)
    run = torch.compile(copy.deepcopy(model), backend=partita_ddp, options={"inner": "aot_eager"})
    loss_of(run(batch(0, 0))).backward()
    assert torch.equal(run(batch(0, 0)), model(batch(0, 0)))
