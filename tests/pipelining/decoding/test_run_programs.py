"""Programs around a model whose stages are on several ranks: as if the model were here."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.runtime.worlds import endings
from torch import Tensor, nn

from partita.errors import ArgumentError, ArgumentTypeError, ExecutionError, PeerFailed
from partita.pipelining import Pipe, SplitPoint, pipeline
from partita.pipelining.decoding import ModelCall, run_programs
from partita.pipelining.decoding.model_call import Program
from partita.pipelining.decoding.run_programs import ProgramStatistics
from partita.runtime import Comm, InProcessWorld

WIDTH = 4


class Remembers(nn.Module):
    """Adds up what it has seen, in a list of the cache."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: dict[int, Any]) -> Tensor:
        layer = cache.setdefault(self.number, {"length": 0, "seen": []})
        layer["length"] += 1
        layer["seen"].append(self.linear(x))
        return torch.stack(layer["seen"]).sum(0).tanh()


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembers(number) for number in range(layers))

    def forward(self, x: Tensor, cache: dict[int, Any]) -> Tensor:
        # what is read here was written by the last layer, on the last stage
        x = x * (1 + cache.get(len(self.layers) - 1, {"length": 0})["length"])
        for layer in self.layers:
            x = layer(x, cache)
        return x


def _model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def _pipe(stages: int) -> Pipe:
    spec = {f"layers.{number}": SplitPoint.BEGINNING for number in range(4 - stages + 1, 4)}
    example = (
        torch.ones(1, WIDTH),
        {},
    )  # no proof: it would call the model again with the cache that is full
    return pipeline(_model(), example, {}, spec, frontend="modules", modes="eval", prove=False)


def _x(number: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))


def _program(number: int, steps: int = 3) -> Program:
    cache: dict[int, Any] = {}
    x = _x(number)
    for step in range(steps):
        x = yield ModelCall((x,), state={"cache": cache}, report=(number, step))
    return x


def _uncut(number: int, steps: int = 3) -> Tensor:
    model, cache, x = _model(), {}, _x(number)
    with torch.no_grad():
        for _ in range(steps):
            x = model(x, cache)
    return x


def _run(stages: int, programs: Any, **options: Any) -> list[Any]:
    pipe = _pipe(stages)

    def run(comm: Comm) -> Any:
        return run_programs(pipe.build_stage(comm.rank, comm=comm), programs(), comm=comm, **options)

    return InProcessWorld(stages).run(run)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("in_flight", [1, 3, 8])
def test_programs_get_what_the_uncut_model_gives(stages: int, in_flight: int) -> None:
    results = _run(
        stages, lambda: [_program(number, 2 + number % 3) for number in range(5)], in_flight=in_flight
    )
    assert results[:-1] == [None] * (stages - 1)
    for number, result in enumerate(results[-1]):
        assert torch.equal(result, _uncut(number, 2 + number % 3))


def test_no_program_at_all_ends() -> None:
    assert _run(2, list)[-1] == []


def test_a_program_without_a_call_ends() -> None:
    def nothing() -> Program:
        return 7
        yield ModelCall()

    assert _run(2, lambda: [nothing(), _program(1), nothing()])[-1][::2] == [7, 7]


def test_every_rank_hears_the_reports_in_order() -> None:
    seen: list[list[Any]] = [[], []]
    pipe = _pipe(2)

    def run(comm: Comm) -> Any:
        return run_programs(
            pipe.build_stage(comm.rank, comm=comm),
            [_program(number) for number in range(2)],
            in_flight=2,
            comm=comm,
            on_report=lambda program, report: seen[comm.rank].append((program, *report)),
        )

    InProcessWorld(2).run(run)
    assert seen[0] == seen[1] == [(number, number, step) for step in range(3) for number in range(2)]


def test_a_stage_keeps_only_the_state_of_its_own_part_and_drops_it_at_the_end() -> None:
    pipe = _pipe(4)
    statistics = [ProgramStatistics() for _ in range(4)]

    def run(comm: Comm) -> Any:
        stage = pipe.build_stage(comm.rank, comm=comm)
        programs = [_program(number) for number in range(4)]
        return run_programs(stage, programs, in_flight=2, comm=comm, statistics=statistics[comm.rank])

    InProcessWorld(4).run(run)
    a_tensor = 2 * WIDTH * 4
    for one in statistics:
        assert one.calls == 12
        assert a_tensor * 3 <= one.state_bytes <= a_tensor * 6


def test_an_error_of_a_program_reaches_every_rank() -> None:
    def fails() -> Program:
        yield from _program(0, 2)
        raise KeyError("mine")

    pipe = _pipe(2)
    seen: list[BaseException] = []

    def run(comm: Comm) -> None:
        try:
            run_programs(pipe.build_stage(comm.rank, comm=comm), [fails()], comm=comm)
        except (KeyError, PeerFailed) as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="mine"):
        InProcessWorld(2).run(run)
    (other,) = [error for error in seen if isinstance(error, PeerFailed)]
    assert other.rank == 1
    assert "mine" in str(other)


def _dies(comm: Comm, dead: int) -> None:
    torch.set_num_threads(1)
    stage = _pipe(2).build_stage(comm.rank, comm=comm)

    calls = 0

    def count(_program: int, _report: Any) -> None:
        nonlocal calls
        calls += 1
        if comm.rank == dead and calls == 3:
            os._exit(3)

    cache: dict[int, Any] = {}

    def program() -> Program:
        x = _x(0)
        for step in range(1000):
            x = yield ModelCall((x,), state={"cache": cache}, report=step)
        return x

    run_programs(stage, [program()], comm=comm, on_report=count)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_is_named_by_the_others_within_seconds(dead: int) -> None:
    outcomes = endings(2, _dies, dead)
    assert outcomes[dead].exitcode == 3
    error = outcomes[1 - dead].error
    assert isinstance(error, PeerFailed)
    assert error.rank == dead


def _in_processes(comm: Comm) -> list[list[float]] | None:
    torch.set_num_threads(1)
    stage = _pipe(2).build_stage(comm.rank, comm=comm)
    results = run_programs(stage, [_program(number) for number in range(3)], in_flight=2, comm=comm)
    return None if results is None else [result.tolist() for result in results]


def test_processes_give_what_the_uncut_model_gives() -> None:
    first, last = endings(2, _in_processes)
    assert first.error is None, first.text
    assert last.error is None, last.text
    assert first.result is None
    assert last.result == [_uncut(number).tolist() for number in range(3)]


# Refusals.


def test_a_captured_stage_is_refused() -> None:
    pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.ones(1, 4),), stages=2)

    def run(comm: Comm) -> None:
        run_programs(pipe.build_stage(comm.rank, comm=comm), [], comm=comm)

    with pytest.raises(ArgumentTypeError, match=r"GraphStage can't keep state between calls.*frontend="):
        InProcessWorld(2).run(run)


def test_a_stage_in_training_mode_is_refused() -> None:
    pipe = _pipe(2)

    def run(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        stage.module.train()
        run_programs(stage, [], comm=comm)

    with pytest.raises(ArgumentError, match="training mode, in which dropout"):
        InProcessWorld(2).run(run)


def test_a_stage_of_another_rank_is_refused() -> None:
    pipe = _pipe(2)

    def run(comm: Comm) -> None:
        run_programs(pipe.build_stage(1 - comm.rank, comm=comm), [], comm=comm)

    with pytest.raises(ArgumentError, match=r"rank \d of 2 has stage \d of 2"):
        InProcessWorld(2).run(run)


class KeepsInItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.kept = x if self.kept is None else self.kept + x
        return self.kept


def test_a_module_that_keeps_tensors_in_itself_takes_one_program_at_a_time() -> None:
    model = nn.Sequential(KeepsInItself(), nn.Linear(WIDTH, WIDTH)).eval()
    spec = {"1": SplitPoint.BEGINNING}
    pipe = pipeline(model, (_x(0),), {}, spec, frontend="modules", modes="eval", prove=False)

    def program() -> Program:
        for _ in range(2):
            x = yield ModelCall((_x(0),))
        return x

    def run(comm: Comm, in_flight: int) -> Any:
        stage = pipe.build_stage(comm.rank, comm=comm)
        return run_programs(stage, [program(), program()], in_flight=in_flight, comm=comm)

    assert InProcessWorld(2).run(run, 1)[1] is not None
    message = r"stage 0 keeps '0\.kept' for its next call in the module itself.*in_flight=1"
    with pytest.raises(ExecutionError, match=message):
        InProcessWorld(2).run(run, 2)


def test_less_than_one_in_flight_is_refused() -> None:
    with pytest.raises(ArgumentError, match="in_flight is 0"):
        _run(2, list, in_flight=0)


def test_a_program_that_yields_something_else_is_refused() -> None:
    def wrong() -> Program:
        yield torch.ones(1)  # type: ignore[misc]

    with pytest.raises(ArgumentTypeError, match="program 0 yields a Tensor: yield a ModelCall"):
        _run(2, lambda: [wrong()])


def test_state_that_comes_later_is_refused() -> None:
    def late() -> Program:
        cache: dict[int, Any] = {}
        yield ModelCall((_x(0),), state={"cache": cache})
        yield ModelCall((_x(0),), state={"cache": {}})

    with pytest.raises(ArgumentError, match="'cache' as state that its first call did not have"):
        _run(2, lambda: [late()])


def test_state_that_is_full_already_is_refused() -> None:
    def full() -> Program:
        yield ModelCall((_x(0),), state={"cache": {9: torch.ones(2**19)}})

    with pytest.raises(ArgumentError, match=r"has 2,097,152 bytes of tensors.*begin with empty state"):
        _run(2, lambda: [full()])


def test_state_that_cannot_be_pickled_is_refused() -> None:
    def local() -> Program:
        yield ModelCall((_x(0),), state={"cache": {9: lambda: 1}})

    with pytest.raises(ExecutionError, match="can't be sent to the other stages"):
        _run(2, lambda: [local()])
