"""Where what crosses lies: on the stages' device, but for what is on the CPU in the uncut model. The meta
device stands for a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from partita.pipelining.interface.values import Value, with_host_values
from partita.pipelining.steps.running.step import StepInputs, StepState
from partita.planning import Action, ActionKind

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda:0")
HIDDEN = Value("hidden", (2, 3), torch.float32, True)
LENGTHS = Value("lengths", (2,), torch.int64, False, on_host=True)


def state_on(device: torch.device) -> StepState:
    stage: Any = SimpleNamespace(device=device, input_memory=None, module=torch.nn.Identity())
    state = StepState({0: stage})
    state.begin(StepInputs(None, None, (1.0,), 0, 0))
    return state


def test_what_the_uncut_model_has_on_the_host_is_received_there() -> None:
    action = Action(0, ActionKind.RECV_F, 0, 0)
    state = state_on(META)
    assert state.empty_like_value(action, 0, HIDDEN).device == META
    assert state.empty_like_value(action, 0, LENGTHS).device == CPU


def test_what_is_sent_lies_where_it_is_received() -> None:
    hidden, lengths = torch.ones(2, 3, requires_grad=True), torch.ones(2, dtype=torch.int64)
    values = [HIDDEN, LENGTHS, HIDDEN]
    sent = state_on(META).placed(0, [hidden, lengths, None], values)
    assert sent[0].device == META
    assert sent[1] is lengths
    assert sent[2] is None
    tensors = [hidden, lengths, None]
    assert state_on(CPU).placed(0, tensors, values) is tensors


def test_a_value_on_the_host_is_one_of_a_model_that_is_elsewhere() -> None:
    crossing = {"hidden": HIDDEN, "lengths": Value("lengths", (2,), torch.int64, False)}
    examples = {"hidden": torch.empty(2, 3, device=META), "lengths": torch.ones(2, dtype=torch.int64)}
    marks = [
        {name: value.on_host for name, value in with_host_values(crossing, examples, devices).items()}
        for devices in ((CPU,), (META, CPU), (GPU, CPU))
    ]
    assert marks == [{"hidden": False, "lengths": False}] * 2 + [{"hidden": False, "lengths": True}]
