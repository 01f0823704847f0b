"""A pipeline whose stages, or parts of them, are recomputed equals the uncut model bit for bit."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.pipelining.blocks_models import Blocks, Cached, Counting, Drawn, Normed, Recomputed, Reversed
from tests.pipelining.models import CASES, NORMED, PLAIN, TRANSFORMER, WIDTH, Case
from tests.pipelining.running import Record, assert_equal, assert_same, cut, piped, train, uncut
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch.nn import functional

from partita._torch.tensors.live_bytes import LiveBytes
from partita.errors import ArgumentError, ExecutionError, ModuleNameError, NotProven
from partita.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    get_schedule_class,
    pipeline,
)
from partita.pipelining.stages import to_torch_stage
from partita.planning import loop_placement, v_placement
from partita.runtime import Comm, InProcessWorld

CPU = torch.device("cpu")
WHOLE = {"transformer", "in place", "outputs", "frozen", "strided", "regions", "batch norm", "counting"}
WHOLE |= {"no parameters", "reused buffer"}
IN_PARTS = {"transformer", "in place", "batch norm", "no parameters", "counting"}
SPLIT = (
    ("ZBVZeroBubble", v_placement(4, 2)),
    ("InterleavedZeroBubble", loop_placement(4, 2)),
    ("DualPipeV", v_placement(4, 2)),
)
"""Schedules that split the backward pass, or let two passes overlap."""


def named(values: Sequence[Any]) -> dict[str, Any]:
    return {"argvalues": values, "ids": [getattr(value, "name", str(value)) for value in values]}


# --- captured models ---


@pytest.mark.parametrize("case", **named([case for case in CASES if case.name in WHOLE]))
def test_whole_stages(case: Case) -> None:
    pipe = cut(case, len(case.after) + 1, recompute=True)
    assert pipe.recompute == frozenset(range(pipe.num_stages))
    assert_same(piped(pipe, case), uncut(case))


@pytest.mark.parametrize("case", **named([TRANSFORMER, NORMED, *(c for c in CASES if c.name == "in place")]))
def test_whole_stages_with_a_split_backward(case: Case) -> None:
    for name, placement in SPLIT:
        pipe = cut(case, 4, recompute=(0, 2, 3))
        assert_same(piped(pipe, case, get_schedule_class(name), 4, placement), uncut(case))


@pytest.mark.parametrize("case", **named([case for case in CASES if case.name in IN_PARTS]))
def test_regions_within_stages(case: Case) -> None:
    names = ("blocks.*.feed", "norm", "embedding") if case is TRANSFORMER else ("a", "c", "d")
    assert_same(piped(cut(case, 1, recompute=names), case), uncut(case))
    pipe = cut(case, 2, recompute=(0, *names[1:]))  # one stage as a whole, parts of the other
    records = piped(pipe, case, get_schedule_class("ZBVZeroBubble"), 4, (0, 0))
    assert_same(records, uncut(case))


def test_parts_of_a_stage_keep_the_names_of_its_state_and_follow_both_modes() -> None:
    plain, pipe = cut(NORMED, 2), cut(NORMED, 2, recompute=("a", "b", "d"))
    for index in range(2):
        keys = list(plain.get_stage_module(index).state_dict())
        assert sorted(pipe.get_stage_module(index).state_dict()) == sorted(keys)
    args, _, _ = NORMED.data(4)
    for mode in (True, False):
        outputs = []
        for one in (plain, pipe):
            one.train(mode)
            torch.manual_seed(3)
            outputs.append([one(*args), torch.rand(1)])
            outputs[-1][0].sum().backward()
        assert_equal(outputs[0], outputs[1])
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad)


def test_a_local_call_with_regions_draws_its_random_numbers_from_torchs_generator() -> None:
    plain, pipe = cut(TRANSFORMER, 2), cut(TRANSFORMER, 2, recompute=("blocks.*",))
    args, _, _ = TRANSFORMER.data(2)
    seen = []
    for one in (plain, pipe):
        torch.manual_seed(1)
        one(*args).sum().backward()
        seen.append([torch.rand(3), *(parameter.grad for parameter in one.parameters())])
    assert_equal(seen[0], seen[1])


def test_a_region_that_fills_its_stage_is_the_whole_stage() -> None:
    pipe = cut(PLAIN, 4, recompute=("c",))
    assert (pipe.recompute, "recomputed as a whole: stages [2]" in str(pipe)) == (frozenset(), False)
    pipe = cut(
        Case("linear", lambda: nn.Sequential(*map(_linear, range(4))), ("0", "1", "2")), 4, recompute=("2",)
    )
    assert pipe.recompute == {2}
    assert "recomputed as a whole: stages [2]" in str(pipe)


def _linear(_: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def test_what_can_not_be_recomputed_is_said() -> None:
    with pytest.raises(
        ArgumentError, match=r"names stage 4, and the model is cut into 2: give .* from 0 to 1"
    ):
        cut(PLAIN, 2, recompute=(4,))
    with pytest.raises(ArgumentError, match=r"recompute has 1\.5: give True, or a list"):
        cut(PLAIN, 2, recompute=(1.5,))
    with pytest.raises(
        ModuleNameError, match=r"recompute='x.\*': no operation .* there are a, b, c, d; '\*'"
    ):
        cut(PLAIN, 2, recompute=("x.*",))


# --- autocast around the step, generators ---


def _autocast_steps(pipe: Pipe) -> list[Any]:
    def body(comm: Comm) -> list[Any]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule, losses = Schedule1F1B(stage, 4, PLAIN.loss), list[Tensor]()
        args, _, target = PLAIN.data(8)
        torch.manual_seed(7)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                schedule.step(*args, target=target, losses=losses)
        return [losses, torch.rand(2), [parameter.grad for parameter in stage.module.parameters()]]

    return InProcessWorld(2).run(body)


def test_autocast_around_a_step_and_the_generator_behind_it() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain = cut(PLAIN, 2, prove=False)
        again = cut(PLAIN, 2, prove=False, recompute=(0, "c"))
    assert_equal(_autocast_steps(again), _autocast_steps(plain))


# --- stages that run Python ---

_SPEC = {"blocks.1": SplitPoint.BEGINNING, "blocks.2": SplitPoint.BEGINNING, "head": SplitPoint.BEGINNING}


def _numbers(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else getattr(value, "items", value)
    return [] if items is None else [tensor for item in items for tensor in _numbers(item)]


def _sum(output: Any, _: Any = None) -> Tensor:
    return torch.stack(
        [(t * torch.linspace(0, 1, t.numel()).view(t.shape)).sum() for t in _numbers(output)]
    ).sum()


def _block_steps(
    make: Callable[[], nn.Module], name: str, placement: Sequence[int], recompute: Any, spec: Any = _SPEC
) -> list[Any]:
    def body(comm: Comm) -> list[Any]:
        torch.manual_seed(0)
        model = make()
        random.seed(1)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        pipe = pipeline(model, (x,), split_spec=spec, frontend="modules", recompute=recompute)
        own = [index for index, rank in enumerate(placement) if rank == comm.rank]
        stages = [pipe.build_stage(index, comm=comm) for index in own]
        schedule, seen = get_schedule_class(name)(stages, 4, _sum), list[Any]()
        for step in range(2):
            losses: list[Tensor] = []
            x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
            schedule.step(x, losses=losses, return_outputs=False)
            seen.append(losses)
        random.seed(5)
        for stage in stages:
            module = stage.module
            seen.append([(key, value.grad) for key, value in module.named_parameters()])
            seen.append(list(module.named_buffers()))
            seen.append(getattr(module.code_that_runs, "settings", None))
        return seen

    return InProcessWorld(max(placement) + 1).run(body)


@pytest.mark.parametrize("make", [Drawn, Cached, Counting, Normed, Reversed], ids=lambda make: make.__name__)
def test_stages_of_models_that_no_graph_can_hold(make: type[nn.Module]) -> None:
    name, placement = ("ZBVZeroBubble", (0, 1, 1, 0)) if make is Normed else ("1F1B", (0, 1, 2, 3))
    expected = _block_steps(make, name, placement, None)
    assert_equal(_block_steps(make, name, placement, True), expected)


def test_a_model_with_checkpoints_of_its_own() -> None:
    spec = {"head": SplitPoint.BEGINNING}
    expected = _block_steps(Recomputed, "1F1B", (0, 1), None, spec)
    assert_equal(_block_steps(Recomputed, "1F1B", (0, 1), True, spec), expected)


def test_parts_of_stages_that_run_python_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"recomputes stages as a whole, not parts of them \('blocks.0'\)"
    ):
        pipeline(Blocks(), (torch.zeros(1, 4),), split_spec=_SPEC, frontend="modules", recompute=["blocks.0"])


class Worldly(nn.Module):
    """Counts in an int, a list and a buffer that is bound anew; draws from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.calls, self.seen = 0, {"rows": [0]}
        self.generator = torch.Generator().manual_seed(4)
        self.register_buffer("share", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["rows"].append(len(x))
        self.share = self.share * 0.9
        noise = torch.rand(WIDTH, generator=self.generator) + torch.rand(WIDTH) * random.random()
        return functional.dropout(self.lin(x).tanh() * self.share * self.calls, 0.2) * noise + len(
            self.seen["rows"]
        )


def _manual(
    make: Callable[[], nn.Module], recompute: bool, kind: Any = ScheduleGPipe, **options: Any
) -> list[Any]:
    def body(comm: Comm) -> list[Any]:
        torch.manual_seed(comm.rank)
        random.seed(3)
        module = make()
        stage = PipelineStage(module, comm.rank, 2, CPU, comm=comm, recompute=recompute, **options)
        schedule = kind([stage] if kind is not ScheduleGPipe else stage, 4, functional.mse_loss)
        losses: list[Tensor] = []
        torch.manual_seed(2)
        for step in range(2):
            x, target = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
            schedule.step(x, target=target, losses=losses)
        schedule.eval(x)
        rest = [
            torch.rand(1),
            vars(module).get("calls"),
            vars(module).get("seen"),
            list(module.named_buffers()),
        ]
        return [losses, *rest, [value.grad for value in module.parameters()]]

    return InProcessWorld(2).run(body)


@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
def test_a_module_that_changes_what_it_holds(name: str) -> None:
    kind = get_schedule_class(name)
    options = {"output_args": torch.zeros_like}  # it can't be run without data, for its generator
    assert_equal(_manual(Worldly, True, kind, **options), _manual(Worldly, False, kind, **options))


class Squares(torch.autograd.Function):
    """Asks twice for what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


class Hooked(nn.Module):
    """A custom function, hooks on tensors and parameters, a view as output, weight norm."""

    calls: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.seen: list[float] = []
        self.lin.bias.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        h = Squares.apply(self.lin(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 3)
        return h.chunk(2, 1)[0]


@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
def test_functions_and_hooks_fire_as_they_did(name: str) -> None:
    kind = get_schedule_class(name)
    assert_equal(_manual(Hooked, True, kind), _manual(Hooked, False, kind))


def test_backward_hooks_of_modules_fire_once() -> None:
    fired: list[int] = []

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        module[1].register_full_backward_hook(lambda *_: fired.append(1))
        return module

    _manual(make, True)
    assert len(fired) == 2 * 2 * 4  # stages, steps, microbatches


# --- refused, with the reason ---


def _error(make: Callable[[], nn.Module], kind: Any = ScheduleGPipe, **options: Any) -> str:
    with pytest.raises(ExecutionError) as error:
        _manual(make, True, kind, **options)
    return str(error.value)


class Cache:
    def __init__(self) -> None:
        self.rows = [0]


class KeepsObject(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        self.cache.rows.append(len(x))
        return super().forward(x)


class WritesLater(nn.Linear):
    """Writes to its buffer from the second microbatch on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.total.add_(1)
        return super().forward(x) * self.total


class WritesLaterUncounted(nn.Linear):
    """Writes to its buffer from the second microbatch on, as torch does not count, and adds it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("total", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.total.data.mul_(0.5)
        return super().forward(x) + self.total


class ClampsItsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


_CALLS: list[int] = []


class Changes(nn.Linear):
    """Goes another way after as many calls as two stages make with four microbatches each."""

    def forward(self, x: Tensor) -> Tensor:
        _CALLS.append(1)
        h = super().forward(x)
        return h.tanh() if len(_CALLS) > 8 else h


class GoesBack(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x).square()
        if not torch.is_grad_enabled():
            return h
        return h + torch.autograd.grad(h.sum(), self.weight, create_graph=True)[0].sum(0)


class WritesToSaved(nn.Linear):
    """What plain autograd refuses, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp().mul_(2)


def test_an_object_that_can_not_be_put_back() -> None:
    message = _error(KeepsObject)
    assert "stage 0 changes self.cache (Cache) in its forward pass" in message
    assert "or take stage 0 out of recompute" in message


def test_a_buffer_that_the_first_microbatch_did_not_write_to() -> None:
    assert "stage 0 writes to total in this forward pass and did not in its first one" in _error(WritesLater)


def test_a_buffer_that_a_later_microbatch_writes_to_through_data() -> None:
    """The second run wrote to it once more, and the next microbatch began with a wrong value."""
    message = _error(WritesLaterUncounted)
    assert "stage 0 writes to total in this forward pass and did not in its first one" in message


def test_a_parameter_that_forward_writes_to() -> None:
    """The message was that of a buffer that the first pass did not write to, which this one did."""
    message = _error(lambda: ClampsItsWeight(WIDTH, WIDTH))
    assert "stage 0 writes to its parameter weight in its forward pass" in message


def test_a_module_that_does_not_compute_the_same() -> None:
    _CALLS.clear()
    message = _error(lambda: Changes(WIDTH, WIDTH), output_args=torch.zeros_like)
    assert "stage 1 does not compute the same when it is run again (autograd saves 2 tensors, and" in message


COUNT = {"calls": 0}


class CountsElsewhere(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        COUNT["calls"] += 1
        return (super().forward(x) * COUNT["calls"]).tanh().sin()


def test_values_that_depend_on_what_is_not_put_back_are_seen() -> None:
    message = _error(lambda: CountsElsewhere(WIDTH, WIDTH), output_args=lambda x: x)
    assert "does not compute the same when it is run again (the tensor number" in message
    assert "has other values" in message


class Shuffles(nn.Linear):
    """Orders the rows of its input by a generator that is not put back."""

    def forward(self, x: Tensor) -> Tensor:
        rows = list(range(len(x)))
        _ORDER.shuffle(rows)
        return super().forward(x[rows]).tanh()


_ORDER = random.Random(0)


def test_the_same_rows_in_another_order_are_seen() -> None:
    """All values that autograd saves were the same, in another order: the gradients were wrong."""
    message = _error(lambda: Shuffles(WIDTH, WIDTH), output_args=lambda x: x)
    assert "does not compute the same when it is run again (the tensor number" in message


def test_a_stage_that_runs_python_twice_is_told_of() -> None:
    with pytest.warns(NotProven, match=r"stage [01] runs the model's own code, twice for each microbatch"):
        _manual(lambda: nn.Linear(WIDTH, WIDTH), True)


class OnlyInTraining(nn.Linear):
    """Has another graph in each mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin() if self.training else x)


def test_a_stage_with_a_graph_for_each_mode_is_not_the_models_own_code() -> None:
    """It was said to be, with the advice to cut the graph, and its values were compared."""
    pipe = pipeline(OnlyInTraining(WIDTH, WIDTH), (torch.randn(2, WIDTH),), stages=1, prove=False)
    (comm,) = InProcessWorld(1).run(lambda comm: comm)
    stage = pipe.build_stage(0, comm=comm)
    stage.recompute = True
    (name,), (output,) = stage.border.inputs, stage.border.outputs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage.forward(0, {name: torch.ones(2, WIDTH)}, train=True)
    stage.backward(0, {output: torch.ones(2, WIDTH)})
    assert all(parameter.grad is not None for parameter in stage.module.parameters())


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def test_a_wrapped_stage_is_refused() -> None:
    def body(comm: Comm) -> None:
        stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, CPU, comm=comm, recompute=True)
        stage.module = Wrapper(stage.module)
        schedule = ScheduleGPipe(stage, 4, functional.mse_loss)
        schedule.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))

    with pytest.raises(
        ExecutionError, match="stage 0 is wrapped in Wrapper, which recompute would run twice"
    ):
        InProcessWorld(1).run(body)


def test_a_backward_pass_inside_a_forward_pass() -> None:
    message = _error(lambda: GoesBack(WIDTH, WIDTH), output_args=lambda x: x)
    assert "stage 0 runs a backward pass inside its forward pass" in message


def test_a_write_to_what_the_backward_pass_needs() -> None:
    message = _error(lambda: WritesToSaved(WIDTH, WIDTH))
    assert "stage 1 writes in place to a tensor ([2, 8]) that its backward pass needs" in message


def test_a_forward_hook_would_be_called_twice() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        module[0].register_forward_hook(lambda *_: None)
        return module

    message = _error(make)
    assert "the forward hook" in message
    assert "of '0' would be called twice for each microbatch, since stage 0 is recomputed" in message


def test_a_module_that_delays_its_own_gradients() -> None:
    message = _error(lambda: nn.Linear(WIDTH, WIDTH), dw_builder=lambda: lambda: None)
    assert "stage 0 has a dw_builder and is to be recomputed" in message


def test_torchs_schedules_do_not_recompute() -> None:
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 2, CPU, recompute=True)
    with pytest.raises(ArgumentError, match="stage 0 is to be recomputed, which torch's schedules don't do"):
        to_torch_stage(stage)


# --- memory ---


def _kept(recompute: Any, kind: Any = ScheduleGPipe) -> tuple[int, int]:
    """Bytes that are alive between F and B, and the most that ever are."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh()) for _ in range(4)]
    pipe = pipeline(nn.Sequential(*layers), (torch.zeros(64, 256),), stages=1, recompute=recompute)
    seen: list[int] = []

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(0, comm=comm)
        schedule = kind(stage, 4, _seeing)
        x, target = torch.randn(256, 256), torch.randn(256, 256)
        schedule.step(x, target=target)
        for parameter in stage.module.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        with LiveBytes() as live:
            seen.append(0)
            _Seen.live, _Seen.after_forward = live, seen
            schedule.step(x, target=target, return_outputs=False)
            seen.append(live.most)
            _Seen.live = None

    InProcessWorld(1).run(body)
    return max(seen[:-1]), seen[-1]


class _Seen:
    live: LiveBytes | None = None
    after_forward: list[int]


def _seeing(output: Tensor, target: Tensor) -> Tensor:
    loss = functional.mse_loss(output, target)
    if _Seen.live is not None:
        _Seen.after_forward.append(_Seen.live.now())
    return loss


def test_memory_is_given_back_between_the_passes() -> None:
    one = 64 * 256 * 4  # a microbatch's activations of one width
    plain, plain_most = _kept(None)
    whole, whole_most = _kept(True)
    parts, parts_most = _kept(("*",))
    assert plain >= 4 * 4 * 3 * one
    assert whole <= 4 * 3 * one  # what entered, what came out, the loss
    assert whole < parts <= 4 * 8 * one  # what entered each of four parts
    assert whole_most < 0.5 * plain_most
    assert parts_most < 0.6 * plain_most


# --- processes ---


def _own_process(comm: Comm, pickled: bytes) -> bytes:
    torch.set_num_threads(1)
    pipe, record = pickle.loads(pickled), Record()
    stages = [pipe.build_stage(index, comm=comm) for index in (comm.rank, 3 - comm.rank)]
    train(
        get_schedule_class("ZBVZeroBubble")(stages, 4, TRANSFORMER.loss),
        [s.module for s in stages],
        TRANSFORMER,
        record,
    )
    return pickle.dumps(record)


def test_over_processes() -> None:
    pickled = pickle.dumps(cut(TRANSFORMER, 4, recompute=(1, "blocks.0.feed", 3)))
    assert_same([*map(pickle.loads, ProcessWorld(2).run(_own_process, pickled))], uncut(TRANSFORMER))
