"""Passes of a token: modules of other stages are not run, and what they would have done is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.errors import ExecutionError
from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.blocks.decoding_pass import StageDecoder
from partita.pipelining.blocks.packet import first_packet
from partita.pipelining.blocks.staying_state import StayingState

WIDTH = 4
CPU = torch.device("cpu")


class Layer(nn.Module):
    """Counts its calls, and keeps what it has seen in the memory."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Any:
        self.calls += 1
        y = self.linear(x)
        memory[self.name] = torch.cat([memory[self.name], y]) if self.name in memory else y.clone()
        return {"out": memory[self.name].sum(0, keepdim=True), "memory": memory}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer("first"), Layer("second")

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        x = self.first(x * 2, memory)["out"]
        answer = self.second(x, memory)
        assert answer["memory"] is memory
        return answer["out"]


class ReadsOthers(Model):
    """The second layer reads what the first has kept."""

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        x = self.first(x * 2, memory)["out"]
        return self.second(x, {"second": memory["first"]})["out"]


class Leaves(Model):
    """The first layer's result goes through a list that it is given."""

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        shared: list[Tensor] = []
        x = self.leaver(self.first(x * 2, memory)["out"], shared)
        return self.second(x + shared[0], memory)["out"]

    def __init__(self) -> None:
        super().__init__()
        self.leaver = Leaver()


class Leaver(nn.Module):
    def forward(self, x: Tensor, shared: list[Tensor]) -> Tensor:
        shared.append(x.exp())
        return x - 1


class Catches(Model):
    """Goes on where the first layer fails."""

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        try:
            x = self.first(x * 2, memory)["out"]
            if len(memory["first"]) > 1:
                x = self.first(x[:, :1], memory)["out"]
        except RuntimeError:
            x = x - 1
        return self.second(x, memory)["out"]


def _stages(model: nn.Module) -> tuple[list[StageDecoder], list[StayingState]]:
    example = (torch.ones(1, WIDTH), {})
    spec = {"second": SplitPoint.BEGINNING}
    pipe = pipeline(model.eval(), example, {}, spec, frontend="modules", modes="eval", prove=False)
    decoders = [StageDecoder(pipe.get_stage_module(stage)) for stage in range(2)]  # type: ignore[arg-type]
    return decoders, [StayingState({"memory": {}}, CPU) for _ in range(2)]


def _call(decoders: Sequence[StageDecoder], staying: Sequence[StayingState], x: Tensor) -> Any:
    """One call through both stages; what each changes is entered by the other."""
    first = decoders[0].run(first_packet((x,), {}, live=False), staying[0], {})
    second = decoders[1].run(first.output, staying[1], {0: first.changes})
    staying[0].apply(second.changes)
    staying[0].begin()
    return second.output


@pytest.mark.parametrize("kind", [Model, Leaves, Catches])
def test_calls_in_a_row_are_those_of_the_whole_model(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind()
    decoders, staying = _stages(model)
    memory: dict[str, Tensor] = {}
    for number in range(3):
        x = torch.full((1, WIDTH), float(number))
        with torch.no_grad():
            expected = model(x, memory)
        assert torch.equal(_call(decoders, staying, x), expected)
    assert staying[0].objects["memory"]["second"].is_meta
    assert staying[1].objects["memory"]["first"].is_meta
    assert torch.equal(staying[1].objects["memory"]["second"], memory["second"])


def test_modules_of_an_earlier_stage_are_not_run() -> None:
    decoders, staying = _stages(Model())
    for _ in range(3):
        _call(decoders, staying, torch.ones(1, WIDTH))
    roots = [decoder.module.code_that_runs for decoder in decoders]
    calls = [[getattr(root, name).calls for name in ("first", "second")] for root in roots]
    before = calls[0][1]  # of the example
    assert calls == [[before + 3, before], [before, before + 3]]


def test_reading_the_memory_of_another_stage_is_an_error_that_says_so() -> None:
    decoders, staying = _stages(ReadsOthers())
    message = "uses a tensor .* that an earlier stage has made and not handed on"
    x = torch.ones(1, WIDTH)
    with pytest.raises(ExecutionError, match=message):
        _call(decoders, staying, x)
