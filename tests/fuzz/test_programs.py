"""Any model, cut anywhere: random programs with random cuts equal the uncut model, or are refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.fuzz.test_models import SETTINGS
from tests.pipelining.models import WIDTH, Case
from tests.pipelining.running import Record, assert_same, piped, uncut
from torch import Tensor, nn

from partita.errors import CaptureError, InfeasiblePlan
from partita.pipelining import Schedule1F1B, ScheduleGPipe, pipe_split, pipeline

UNARY = ("linear", "tied", "tanh", "write", "dropout", "detach", "norm", "lookup", "flip", "no_grad", "noise")
BINARY = ("add", "multiply")


@dataclass(frozen=True)
class Op:
    kind: str
    operands: tuple[int, ...]
    split: bool


@dataclass(frozen=True)
class Program:
    ops: tuple[Op, ...]
    results: tuple[int, ...]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    count = draw(st.integers(2, 9))
    ops = []
    for position in range(count):
        kind = draw(st.sampled_from(UNARY + BINARY))
        # values near the end are taken more often, so that most of them are used
        operand = st.integers(max(0, position - 2), position) | st.integers(0, position)
        operands = tuple(draw(operand) for _ in range(2 if kind in BINARY else 1))
        ops.append(Op(kind, operands, draw(st.booleans()) and position < count - 1))
    extra = draw(st.lists(st.integers(0, count), max_size=2))
    return Program(tuple(ops), (count, *extra))


class Running(nn.Module):
    """Runs a program; value 0 is the input."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleDict()
        for number, op in enumerate(program.ops):
            if op.kind in ("linear", "norm", "lookup"):
                made = {"linear": nn.Linear, "norm": nn.BatchNorm1d, "lookup": nn.Embedding}[op.kind]
                self.layers[str(number)] = made(*((WIDTH,) if op.kind == "norm" else (WIDTH, WIDTH)))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [self.first(x)]
        for number, op in enumerate(self.program.ops):
            values.append(self._apply(number, op.kind, *(values[operand] for operand in op.operands)))
            if op.split:
                pipe_split()
        first, *others = (values[result] for result in self.program.results)
        return self.last(first), *others

    def _apply(self, number: int, kind: str, x: Tensor, y: Tensor | None = None) -> Tensor:
        if kind in ("linear", "norm"):
            return self.layers[str(number)](x)
        if kind == "lookup":
            return self.layers[str(number)](x.argmax(1)) + x
        if kind == "tied":
            return torch.nn.functional.linear(x, self.first.weight)
        if kind == "write":
            return x.mul_(0.5)
        if kind == "no_grad":
            with torch.no_grad():
                return x.abs().amax(0, keepdim=True).expand(2, -1) + self.last.bias
        if kind == "noise":
            return self.drop(x) * (0.9 if self.training else 1.0)
        simple = {
            "tanh": torch.tanh,
            "dropout": self.drop,
            "detach": torch.detach,
            "flip": lambda v: v.flip(0),
        }
        if kind in simple:
            return simple[kind](x)
        assert y is not None
        return x + y if kind == "add" else x * y


def _loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """The model's other results are not in it."""
    return nn.functional.mse_loss(output[0], target)


@SETTINGS
@given(programs(), st.sampled_from([ScheduleGPipe, Schedule1F1B]))
def test_random_models_cut_anywhere_equal_the_uncut_ones(program: Program, kind: type) -> None:
    case = Case("random", lambda: Running(program), loss=_loss)
    args, kwargs, _ = case.data(2)
    assume(any(op.split for op in program.ops))
    try:
        expected = uncut(case, run=_once)
    except RuntimeError:  # autograd needs a value that the program writes to
        assume(False)
    try:
        pipe = pipeline(case.model(), args, kwargs)
    except (CaptureError, InfeasiblePlan):  # a write that two stages would see, or an empty stage
        assume(False)
    assert_same(piped(pipe, case, kind, run=_once), expected)


def _once(runner: object, modules: list[nn.Module], case: Case, record: Record) -> None:
    args, _, target = case.data(8)
    losses: list[Tensor] = []
    record.outputs.append(runner.step(*args, target=target, losses=losses))
    record.losses.append(losses)
    for module in modules:
        record.note(module)
