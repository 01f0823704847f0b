from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.pipelining.models import MASK, NORMED, OUTPUTS, PLAIN, SKIP, TRANSFORMER, WIDTH, Case, first_loss
from tests.pipelining.running import Record, assert_equal, assert_same, cut, errors_of, piped, uncut
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from partita.errors import (
    ArgumentError,
    ExecutionError,
    MicrobatchError,
    PeerFailed,
    ScheduleError,
    SignatureMismatch,
)
from partita.pipelining import (
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    UncutReference,
    get_schedule_class,
    keyed_graph,
    pipeline,
)
from partita.pipelining.schedules import PipelineSchedule, _ScheduleForwardOnly
from partita.pipelining.stages import Stage
from partita.pipelining.training import verify_step
from partita.runtime import Comm, InProcessWorld, Replicate, TensorChunkSpec, Tracer


def _stage(pipe: Pipe, comm: Comm) -> Stage:
    return copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)


def _step(schedule: PipelineSchedule, case: Case, samples: int = 8) -> Any:
    args, kwargs, target = case.data(samples)
    return schedule.step(*args, target=target, **kwargs)


# --- what is right ------------------------------------------------------------


def test_two_steps_accumulate_and_eval_touches_no_gradient() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> bool:
        stage = _stage(pipe, comm)
        schedule = ScheduleGPipe(stage, 4, PLAIN.loss)
        _step(schedule, PLAIN)
        first = [parameter.grad.clone() for parameter in stage.module.parameters()]
        schedule.eval(*PLAIN.data(8)[0])
        assert_equal([parameter.grad for parameter in stage.module.parameters()], first)
        _step(schedule, PLAIN)
        for parameter, gradient in zip(stage.module.parameters(), first, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)
        return True

    assert InProcessWorld(2).run(body) == [True, True]


@pytest.mark.parametrize("case", [PLAIN, SKIP], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
def test_first_stages_may_be_frozen_after_the_cut_and_trained_again(case: Case, name: str) -> None:
    """Gradual unfreezing: what left a frozen stage was refused, since it had a gradient at the cut."""

    def run(runner: Any, modules: Sequence[nn.Module], case: Case, record: Record) -> None:
        parameters = {name: p for module in modules for name, p in module.named_parameters()}
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.05)
        for step, frozen in enumerate(((), ("a", "b"), ("a", "c"), ())):
            for name, parameter in parameters.items():
                parameter.requires_grad_(not name.startswith(frozen))
            args, kwargs, target = case.data(8, seed=step)
            losses: list[Tensor] = []
            record.outputs.append(runner.step(*args, target=target, losses=losses, **kwargs))
            record.losses.append(losses)
            for module in modules:
                record.note(module)
            optimizer.step()
            optimizer.zero_grad()

    assert_same(piped(cut(case, 4), case, get_schedule_class(name), run=run), uncut(case, run=run))


@pytest.mark.parametrize("case", [TRANSFORMER, NORMED, MASK, OUTPUTS], ids=lambda case: case.name)
def test_eval_in_eval_mode_is_the_model_in_eval_mode(case: Case) -> None:
    pipe = cut(case, 3)
    args, kwargs, _ = case.data(8)
    model = case.model().eval()
    with torch.no_grad():
        expected = model(*args, **kwargs)

    def body(comm: Comm) -> Any:
        stage = _stage(pipe, comm)
        stage.module.eval()
        return Schedule1F1B(stage, 4).eval(*args, **kwargs)

    *others, results = InProcessWorld(3).run(body)
    assert others == [None, None]
    leaves = [(results["out"][0], expected["out"][0])] if case is OUTPUTS else [(results, expected)]
    for left, right in leaves:
        torch.testing.assert_close(left, right)  # a matmul of 8 rows rounds otherwise than four of 2


def test_dropout_does_not_depend_on_the_number_of_stages() -> None:
    losses = [piped(cut(TRANSFORMER, stages), TRANSFORMER)[-1].losses for stages in (1, 2, 4)]
    assert_equal(losses[1], losses[0])
    assert_equal(losses[2], losses[0])


def test_dropout_differs_between_steps_microbatches_and_seeds() -> None:
    pipe = cut(TRANSFORMER, 1)
    one, _, target = TRANSFORMER.data(2)
    same = (torch.cat([one[0]] * 4),)

    def body(comm: Comm, seed: int) -> list[Tensor]:
        schedule, results = ScheduleGPipe(_stage(pipe, comm), 4, TRANSFORMER.loss, seed=seed), []
        for _ in range(2):
            losses: list[Tensor] = []
            schedule.step(*same, target=torch.cat([target] * 4), losses=losses)
            results += losses
        return results

    values = [loss.item() for seed in (0, 1) for loss in InProcessWorld(1).run(body, seed)[0]]
    assert len(set(values)) == len(values)


def test_torchs_own_generator_is_as_before_the_step() -> None:
    pipe = cut(TRANSFORMER, 1)

    def body(comm: Comm) -> None:
        schedule = ScheduleGPipe(_stage(pipe, comm), 4, TRANSFORMER.loss)
        args, _, target = TRANSFORMER.data(8)
        before = torch.get_rng_state()
        schedule.step(*args, target=target)
        assert torch.equal(torch.get_rng_state(), before)

    InProcessWorld(1).run(body)


def test_an_input_that_wants_a_gradient_gets_it() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.a(x).tanh()) * y

    def fresh_batch() -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        return torch.randn(8, WIDTH, requires_grad=True), torch.randn(8, WIDTH, requires_grad=True)

    case = Case("inputs", Two, ("a",))
    model, target = case.model(), torch.zeros(8, WIDTH)
    example = tuple(value[:2].detach().requires_grad_() for value in fresh_batch())
    pipe = pipeline(model, example, split_spec=case.split_spec(2))
    x, y = fresh_batch()

    def body(comm: Comm) -> None:
        ScheduleGPipe(_stage(pipe, comm), 4, case.loss).step(x, y, target=target)

    InProcessWorld(2).run(body)
    expected = fresh_batch()
    UncutReference(keyed_graph(model, example), 4, case.loss).step(*expected, target=target)
    assert_equal([x.grad, y.grad], [value.grad for value in expected])


def test_what_the_loss_ignores_gets_no_gradient_at_all() -> None:
    class Ignored(nn.Module):
        """Stage 0 makes a second result that the loss does not use, from a layer of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.side, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            side = self.side(x)
            return self.b(self.a(x)), side

    case = Case("ignored", Ignored, ("a",), loss=first_loss)
    results, expected = piped(cut(case, 2), case), uncut(case)
    assert expected.gradients["side.weight"] is None
    assert results[0].gradients["side.weight"] is None
    assert_equal(results[0].state["side.weight"], expected.state["side.weight"])


def test_losses_are_those_of_the_microbatches_also_in_evaluation() -> None:
    pipe = cut(PLAIN, 2)
    args, _, target = PLAIN.data(8)

    def body(comm: Comm) -> list[list[Tensor]]:
        schedule = Schedule1F1B(_stage(pipe, comm), 4, PLAIN.loss)
        trained: list[Tensor] = [torch.tensor(7.0)]
        evaluated: list[Tensor] = []
        untouched: list[Tensor] = []
        schedule.step(*args, target=target, losses=trained)
        schedule.eval(*args, target=target, losses=evaluated)
        schedule.eval(*args, losses=untouched)
        return [trained, evaluated, untouched]

    first, last = InProcessWorld(2).run(body)
    assert first == [[], [], []]
    assert len(last[0]) == 4
    assert_equal(last[1], last[0])
    assert last[2] == []


@pytest.mark.parametrize("scale", [True, False])
def test_scale_grads_weights_the_losses(scale: bool) -> None:
    pipe = cut(PLAIN, 1)

    def body(comm: Comm) -> Tensor:
        stage = _stage(pipe, comm)
        _step(ScheduleGPipe(stage, 4, PLAIN.loss, scale_grads=scale), PLAIN)
        return stage.module.get_parameter("a.weight").grad

    model, (args, _, target) = PLAIN.model(), PLAIN.data(8)
    (PLAIN.loss(model(*args), target) * (1 if scale else 4)).backward()
    torch.testing.assert_close(InProcessWorld(1).run(body)[0], model.a.weight.grad)


def test_chunk_and_merge_specs_are_used() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return (self.b(self.a(x.t()).tanh()) + shift).t()

    x, shift = torch.randn(WIDTH, 8), torch.randn(2, WIDTH)
    pipe = pipeline(Turned(), (x[:, :2],), {"shift": shift}, stages=2)

    def body(comm: Comm) -> Tensor | None:
        schedule = ScheduleGPipe(
            _stage(pipe, comm),
            4,
            args_chunk_spec=(TensorChunkSpec(1),),
            kwargs_chunk_spec={"shift": Replicate()},
            output_merge_spec=TensorChunkSpec(1),
        )
        return schedule.eval(x, shift=shift)

    expected = torch.cat([pipe(part, shift=shift) for part in x.split(2, 1)], 1)
    assert torch.equal(InProcessWorld(2).run(body)[1], expected)


def test_under_torchs_profiler_every_action_has_a_name_for_people() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> set[str]:
        schedule = Schedule1F1B(_stage(pipe, comm), 2, PLAIN.loss)
        args, _, target = PLAIN.data(4)
        if comm.rank == 0:
            schedule.step(*args, target=target)
            return set()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            schedule.step(*args, target=target)
        return {event.name for event in profiler.events()}

    assert {
        "pipeline step 0, 1F1B, rank 1",
        "stage 1 forward, microbatch 0",
        "wait for what stage 1 forward, microbatch 0 takes",
        "stage 1 backward, microbatch 1",
        "stage 1 receives activations from stage 0, microbatch 1",
        "stage 1 sends gradients to stage 0, microbatch 0",
    } <= InProcessWorld(2).run(body)[1]


def test_a_tracer_records_every_action_and_may_be_replaced() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> tuple[set[str], int]:
        schedule = Schedule1F1B(_stage(pipe, comm), 2, PLAIN.loss)
        schedule.tracer = Tracer(comm.rank)
        args, _, target = PLAIN.data(4)
        schedule.step(*args, target=target)
        return {event.name for event in schedule.tracer.events}, len(schedule.schedule().actions(comm.rank))

    first, last = InProcessWorld(2).run(body)
    assert {"0F0", "0F1", "0B0", "0B1", "0SEND_F0", "0RECV_B1", "wait 0B0"} <= first[0]
    assert {"1F0", "1B1", "1SEND_B1", "1RECV_F0", "wait 1F0"} <= last[0]


def test_1f1b_holds_fewer_microbatches_than_gpipe() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> tuple[tuple[int, ...], ...]:
        stage = _stage(pipe, comm)
        return tuple(
            kind(stage, 8, PLAIN.loss).schedule().in_flight() for kind in (ScheduleGPipe, Schedule1F1B)
        )

    assert InProcessWorld(2).run(body)[0] == ((8, 8), (2, 1))


def test_schedule_classes_are_found_in_any_case() -> None:
    assert get_schedule_class("1f1B") is Schedule1F1B
    assert get_schedule_class("ScheduleGPIPE") is ScheduleGPipe
    with pytest.raises(ScheduleError, match="there is no schedule class 'zigzag': choose one of GPipe, 1F1B"):
        get_schedule_class("zigzag")


# --- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_microbatches": (4, 2)}, "n_microbatches is {} on rank"),
        ({"kind": (ScheduleGPipe, Schedule1F1B)}, "the schedule is {!r} on rank"),
        ({"seed": (0, 1)}, "seed is {} on rank"),
        ({"scale_grads": (True, False)}, "scale_grads is {} on rank"),
    ],
    ids=["microbatches", "schedule", "seed", "scale"],
)
def test_settings_that_differ_are_an_error_on_both_ranks(
    settings: dict[str, tuple[Any, Any]], text: str
) -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> None:
        chosen = {name: values[comm.rank] for name, values in settings.items()}
        kind = chosen.pop("kind", ScheduleGPipe)
        kind(_stage(pipe, comm), chosen.pop("n_microbatches", 4), PLAIN.loss, **chosen)

    (name, values), *_ = settings.items()
    said = [value.kind if name == "kind" else value for value in values]
    for rank, error in enumerate(errors_of(2, body)):
        assert isinstance(error, (SignatureMismatch, PeerFailed))
        assert any(text.format(value) in str(error) for value in said), (rank, error)


def test_stages_of_different_cuts_are_an_error_on_both_ranks() -> None:
    pipes = (cut(PLAIN, 2), pipeline(PLAIN.model(), PLAIN.data(4)[0], split_spec={"b": SplitPoint.END}))
    for error in errors_of(2, lambda comm: ScheduleGPipe(_stage(pipes[comm.rank], comm), 4, PLAIN.loss)):
        assert "hold stages of different cuts: cut the same model in the same way on both" in str(error)


def test_ranks_whose_code_makes_equal_calls_in_another_order_are_told_of_hash_seeds() -> None:
    class Model(nn.Module):
        def __init__(self, order: Sequence[str]) -> None:
            super().__init__()
            self.order = order
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("full", torch.ones(4))
            self.register_buffer("sliding", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            tables = {name: torch.mul(x, getattr(self, name)) for name in self.order}
            result: Tensor = self.b(self.a(x) + tables["full"]) + tables["sliding"]
            return result

    spec = {"a": SplitPoint.END}
    orders = (("full", "sliding"), ("sliding", "full"))
    pipes = [pipeline(Model(order), (torch.ones(1, 4),), split_spec=spec) for order in orders]
    for error in errors_of(2, lambda comm: ScheduleGPipe(_stage(pipes[comm.rank], comm), 4, PLAIN.loss)):
        assert re.search(r"different models: %\d+ = aten.mul.Tensor\(%\d+, full\) on rank 0, and", str(error))
        assert "start all processes with PYTHONHASHSEED=0" in str(error)


def test_a_missing_or_doubled_stage_is_an_error_on_all_ranks() -> None:
    pipe = cut(PLAIN, 3)
    for error in errors_of(2, lambda comm: ScheduleGPipe(_stage(pipe, comm), 4)):
        assert "no rank holds stage 2: build all of the 3 stages, several on a rank if need be" in str(error)
    for error in errors_of(2, lambda comm: ScheduleGPipe(pipe.build_stage(0, comm=comm), 4)):
        assert "stage 0 is on rank 0 and on rank 1: build each stage once" in str(error)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (("step", "eval"), "is about to run step() number 0 in train mode, but rank 1 eval() number 0"),
        (("train", "eval mode"), "step() number 0 in train mode, but rank 1 step() number 0 in eval mode"),
    ],
)
def test_ranks_that_are_about_to_do_different_things_say_so(calls: tuple[str, str], text: str) -> None:
    pipe = cut(PLAIN, 2)
    args, _, target = PLAIN.data(8)

    def body(comm: Comm) -> None:
        stage = _stage(pipe, comm)
        call = calls[comm.rank]
        stage.module.train(call != "eval mode")
        schedule = ScheduleGPipe(stage, 4, PLAIN.loss)
        (schedule.eval if call == "eval" else schedule.step)(*args, target=target)

    first, last = errors_of(2, body)
    assert isinstance(first, SignatureMismatch)
    assert text in str(first)
    assert isinstance(last, (SignatureMismatch, PeerFailed))
    assert "call step(), eval() and train() in the same order on every rank" in str(last)


def test_one_rank_more_steps_than_the_other_is_no_hang() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> None:
        schedule = ScheduleGPipe(_stage(pipe, comm), 4, PLAIN.loss)
        for _ in range(1 + comm.rank):
            _step(schedule, PLAIN)

    errors = errors_of(2, body)
    assert errors[0] is None
    assert isinstance(errors[1], PeerFailed)
    assert "rank 0 left" in str(errors[1])


def test_a_batch_of_the_wrong_size_names_shapes_and_reaches_all_ranks() -> None:
    pipe = cut(PLAIN, 2, dynamic_shapes=False)
    text = r"microbatch 0 brings float32[3, 8] for x: float32[2, 8]: give what the model was captured with"
    for error in errors_of(2, lambda comm: _step(ScheduleGPipe(_stage(pipe, comm), 4, PLAIN.loss), PLAIN, 9)):
        assert text in str(error)


def test_a_batch_smaller_than_the_microbatches_is_refused() -> None:
    pipe = cut(PLAIN, 1)
    (error,) = errors_of(1, lambda comm: _step(ScheduleGPipe(_stage(pipe, comm), 4, PLAIN.loss), PLAIN, 3))
    assert isinstance(error, MicrobatchError)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda output, target: output - target,
            "loss_fn returns a tensor of shape [2, 8]: return one number",
        ),
        (lambda output, target: 3.0, "loss_fn returns float: return a tensor of one number"),
        (lambda output, target: target.sum(), "the loss does not depend on any parameter that is trained"),
    ],
    ids=["not scalar", "not a tensor", "constant"],
)
def test_a_loss_that_can_not_be_used_says_why(loss: Any, text: str) -> None:
    pipe = cut(PLAIN, 2)
    for error in errors_of(2, lambda comm: _step(ScheduleGPipe(_stage(pipe, comm), 4, loss), PLAIN)):
        assert isinstance(error, (ExecutionError, PeerFailed))
        assert text in str(error)


def test_a_step_without_the_target_that_its_loss_needs_says_so() -> None:
    pipe = cut(PLAIN, 2)
    (x,), _, _ = PLAIN.data(8)
    errors = errors_of(2, lambda comm: ScheduleGPipe(_stage(pipe, comm), 4, nn.functional.mse_loss).step(x))
    assert isinstance(errors[1], SignatureMismatch)
    assert "loss_fn fails without a target (AttributeError" in str(errors[1])


def test_a_mistake_in_a_loss_that_needs_no_target_is_not_taken_for_a_missing_one() -> None:
    pipe = cut(PLAIN, 2)
    (x,), _, _ = PLAIN.data(8)
    errors = errors_of(2, lambda comm: ScheduleGPipe(_stage(pipe, comm), 4, lambda y, _: y.smu()).step(x))
    assert isinstance(errors[1], AttributeError)


class _LossOfLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.head(self.body(x))
        return {"y": y} if labels is None else {"loss": nn.functional.mse_loss(y, labels), "y": y}


def test_a_step_without_what_the_models_own_loss_needs_says_so() -> None:
    x = torch.randn(8, 4)
    cuts = {"head": SplitPoint.BEGINNING}
    pipe = pipeline(_LossOfLabels(), (x[:2],), {"labels": x[:2]}, split_spec=cuts, frontend="modules")
    errors = errors_of(2, lambda comm: ScheduleGPipe(_stage(pipe, comm), 4).step(x))
    assert isinstance(errors[1], SignatureMismatch)
    assert "its output has none (no 'loss'): give step() what the model computes it from" in str(errors[1])


def test_a_step_without_a_loss_function_runs_forward_only() -> None:
    pipe = cut(PLAIN, 2)
    (x,), _, _ = PLAIN.data(8)

    def body(comm: Comm) -> tuple[Any, bool]:
        stage = _stage(pipe, comm)
        results = ScheduleGPipe(stage, 4).step(x)
        return results, all(parameter.grad is None for parameter in stage.module.parameters())

    (nothing, untouched), (output, also_untouched) = InProcessWorld(2).run(body)
    assert nothing is None
    assert untouched
    assert also_untouched
    assert not output.requires_grad
    assert_equal(output, UncutReference(keyed_graph(PLAIN.model(), (x[:2],)), 4).step(x), "output")


def test_a_schedule_that_only_goes_forward_has_losses_and_makes_no_step() -> None:
    case = PLAIN

    def run(comm: Comm) -> Any:
        stage = _stage(cut(case, 2), comm)
        args, kwargs, target = case.data(8)
        losses: list[Tensor] = []
        schedule = _ScheduleForwardOnly(stage, 4, case.loss)
        output = schedule.step(*args, target=target, losses=losses, **kwargs)
        assert schedule.state_dict() == {"steps": 0}
        assert all(parameter.grad is None for parameter in stage.module.parameters())
        assert not schedule.schedule().has_backward
        again: list[Tensor] = []
        whole = Schedule1F1B(stage, 4, case.loss).eval(*args, target=target, losses=again, **kwargs)
        assert_equal((output, losses), (whole, again))
        return len(losses)

    assert InProcessWorld(2).run(run) == [0, 4]


def test_a_step_with_a_loss_function_on_one_rank_only_is_an_error_on_both() -> None:
    pipe = cut(PLAIN, 2)
    errors = errors_of(
        2,
        lambda comm: _step(ScheduleGPipe(_stage(pipe, comm), 4, PLAIN.loss if comm.rank else None), PLAIN),
    )
    for error in errors:
        assert "is about to run" in str(error)
        assert "eval() or step() without loss_fn number 0 in train mode" in str(error)


def test_keyword_arguments_of_the_loss_function_reach_each_microbatch_whole() -> None:
    pipe = cut(PLAIN, 2)
    args, _, target = PLAIN.data(8)
    weight = torch.linspace(0.1, 2, WIDTH)

    def loss(output: Tensor, target: Tensor, *, weight: Tensor) -> Tensor:
        return (weight * (output - target) ** 2).mean()

    def body(comm: Comm) -> dict[str, Tensor | None]:
        stage = _stage(pipe, comm)
        loss_kwargs = {"weight": weight} if comm.rank else {"weight": None}
        Schedule1F1B(stage, 4, loss).step(*args, target=target, loss_kwargs=loss_kwargs)
        return {name: parameter.grad for name, parameter in stage.module.named_parameters()}

    model = PLAIN.model()
    reference = UncutReference(keyed_graph(model, (args[0][:2],)), 4, loss)
    reference.step(*args, target=target, loss_kwargs={"weight": weight})
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for results in InProcessWorld(2).run(body):
        assert_equal(results, {name: expected[name] for name in results}, "gradients")


def test_a_parameter_that_was_frozen_at_the_cut_and_is_trained_later_is_refused() -> None:
    model = PLAIN.model()
    model.a.requires_grad_(False)
    pipe = pipeline(model, PLAIN.data(2)[0], split_spec={"b": SplitPoint.BEGINNING})

    def body(comm: Comm) -> None:
        stage = _stage(pipe, comm)
        stage.module.requires_grad_(True)
        _step(ScheduleGPipe(stage, 4, PLAIN.loss), PLAIN)

    for error in errors_of(2, body):
        assert "stage 0 makes linear with a gradient, which no stage sends back" in str(error)


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_parameters_are_unfrozen_one_stage_after_the_other_where_all_were_trained_at_the_cut(
    frontend: Any,
) -> None:
    """What the error above advises."""
    model, (args, _, target) = PLAIN.model(), PLAIN.data(8)
    spec = {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}
    pipe = pipeline(model, PLAIN.data(2)[0], split_spec=spec, frontend=frontend)
    unfrozen = ("c", "b", "a")

    def body(comm: Comm) -> None:
        whole = copy.deepcopy(model)
        stage = _stage(pipe, comm)
        for module in (stage.module, whole):
            module.requires_grad_(False)
        schedule, reference = Schedule1F1B(stage, 4, PLAIN.loss), UncutReference(whole, 4, PLAIN.loss)
        for name in unfrozen:
            for module in (stage.module, whole):
                for own, parameter in module.named_parameters():
                    parameter.requires_grad_(parameter.requires_grad or own.startswith(f"{name}."))
            verify_step(schedule, reference, *args, target=target)

    InProcessWorld(3).run(body)


def test_what_is_no_stage_and_what_is_no_loss_is_refused() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> None:
        with pytest.raises(ArgumentError, match="loss_fn is 'mse': give a function"):
            ScheduleGPipe(pipe.build_stage(comm.rank, comm=comm), 2, "mse")  # type: ignore[arg-type]
        for other in (pipe, pipe.get_stage_module(comm.rank), [pipe], None):
            with pytest.raises(ArgumentError, match=r"runs stages, and this is a .*build_stage\(\)"):
                ScheduleGPipe(other, 2)  # type: ignore[arg-type]

    InProcessWorld(2).run(body)


def test_a_tied_parameter_frozen_after_the_cut_is_refused() -> None:
    pipe = cut(TRANSFORMER, 2)

    def body(comm: Comm) -> None:
        stage = _stage(pipe, comm)
        stage.module.get_parameter("embedding.weight").requires_grad_(False)
        _step(ScheduleGPipe(stage, 4, TRANSFORMER.loss), TRANSFORMER)

    for error in errors_of(2, body):
        assert (
            "the tied parameter 'embedding.weight' was trained when the pipeline was cut, and is not now"
            in str(error)
        )


def test_an_input_that_wants_a_gradient_the_example_did_not_is_refused() -> None:
    pipe = cut(PLAIN, 1)

    def body(comm: Comm) -> None:
        schedule = ScheduleGPipe(_stage(pipe, comm), 4, PLAIN.loss)
        schedule.step(torch.randn(8, WIDTH, requires_grad=True), target=torch.zeros(8, WIDTH))

    (error,) = errors_of(1, body)
    assert "the input 'x' wants a gradient, but the pipeline was cut with an example that does not" in str(
        error
    )


def test_an_error_in_a_stage_names_rank_stage_microbatch_and_action_on_every_rank() -> None:
    pipe = cut(PLAIN, 2)
    calls = itertools.count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == 2:
            raise KeyError("weights")
        return PLAIN.loss(output, target)

    first, last = errors_of(2, lambda comm: _step(ScheduleGPipe(_stage(pipe, comm), 4, loss), PLAIN))
    assert isinstance(first, PeerFailed)
    assert first.rank == 1
    assert "rank 1 failed in stage 1, microbatch 2, action 1F2: KeyError: 'weights'" in str(first)
    assert isinstance(last, KeyError)
    assert last.__notes__ == ["(rank 1, stage 1, microbatch 2, action 1F2)"]


def test_an_unknown_schedule_base_no_stage_and_no_microbatch_are_refused() -> None:
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> None:
        stage = _stage(pipe, comm)
        with pytest.raises(
            ScheduleError, match="is the base of the schedules: use Schedule1F1B or ScheduleGPipe"
        ):
            PipelineSchedule(stage, 4)
        with pytest.raises(ScheduleError, match="n_microbatches is 0: give a whole number of at least 1"):
            ScheduleGPipe(stage, 0)
        ScheduleGPipe(stage, 4)  # nothing has ended

    InProcessWorld(2).run(body)
    with pytest.raises(ScheduleError, match="a rank needs at least one stage"):
        ScheduleGPipe([], 4)


def test_without_torch_distributed_a_schedule_says_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"init_process_group"):
        ScheduleGPipe(cut(PLAIN, 1).build_stage(0), 4)


def test_outputs_that_nobody_wants_are_not_kept() -> None:
    pipe = cut(PLAIN, 2)
    args, _, target = PLAIN.data(8)

    def body(comm: Comm) -> tuple[Any, int]:
        schedule = Schedule1F1B(_stage(pipe, comm), 4, PLAIN.loss)
        losses: list[Tensor] = []
        return schedule.step(*args, target=target, losses=losses, return_outputs=False), len(losses)

    assert InProcessWorld(2).run(body) == [(None, 0), (None, 4)]
