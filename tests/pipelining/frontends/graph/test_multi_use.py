from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.pipelining.models import CALLED, TRANSFORMER, WIDTH, Case, Noisy
from tests.pipelining.running import Record, assert_equal, assert_same, cut, piped, train
from torch import Tensor, nn

from partita.pipelining import (
    MultiUseParameterConfig,
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    UncutReference,
    pipeline,
)

TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


class Thrice(nn.Module):
    """Every stage uses one weight, the first twice and the second inside regions; another is used by two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x @ self.shared) @ self.shared.t()
        with torch.no_grad():
            level = (h @ self.shared).abs().amax()
        h = self.b(h / (1 + level))
        with torch.autocast("cpu", torch.bfloat16):
            h = self.c(h @ self.shared * self.scale)
        return self.d(h.float() @ self.shared) * self.scale


THRICE = Case("thrice", Thrice)


def _cut(case: Case, stages: int, spec: Any) -> Pipe:
    return cut(case, stages, multi_use_param_spec=spec)


def _whole(case: Case, pipe: Pipe) -> Record:
    """What the uncut model does, cut with copies: the ordinary reference."""
    record = Record()
    whole = copy.deepcopy(pipe.whole)
    train(UncutReference(whole, 4, case.loss), [whole], case, record)
    return record


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("case", [TRANSFORMER, THRICE, CALLED], ids=lambda case: case.name)
def test_a_transmitted_parameter_trains_like_the_uncut_model(case: Case, schedule: Any) -> None:
    expected = _whole(case, _cut(case, 3, REPLICATE))
    pipe = _cut(case, 3, TRANSMIT)
    assert pipe.replicated_params == []
    assert_same(piped(pipe, case, schedule), expected)


def test_only_the_owner_holds_it_under_all_of_its_names() -> None:
    pipe = _cut(TRANSFORMER, 3, TRANSMIT)
    states = [pipe.get_stage_module(index).state_dict() for index in range(3)]
    assert [name for name in states[0] if "embedding" in name or "head" in name] == [
        "embedding.weight",
        "head.weight",
    ]
    assert not any(name in state for state in states[1:] for name in ("embedding.weight", "head.weight"))
    assert set().union(*states) == TRANSFORMER.model().state_dict().keys()
    value = next(value for value in pipe.routes.values.values() if value.shape == (16, WIDTH))
    assert (0, 2) in pipe.routes.forward
    assert value.name in pipe.routes.forward[0, 2]
    assert value.name in pipe.routes.backward[2, 0]


def test_a_local_call_trains_the_models_own_parameters() -> None:
    model = Noisy()
    expected = copy.deepcopy(model)
    args, kwargs, _ = TRANSFORMER.data(2)
    pipe = pipeline(model, args, kwargs, TRANSFORMER.split_spec(3), multi_use_param_spec=TRANSMIT)
    args, _, target = TRANSFORMER.data(2)
    for runner in (pipe, expected):
        torch.manual_seed(2)
        TRANSFORMER.loss(runner(*args), target).backward()
    assert_equal(model.embedding.weight.grad, expected.embedding.weight.grad)


def test_it_can_be_chosen_by_any_of_a_parameters_names() -> None:
    pipe = _cut(THRICE, 4, {"shared": TRANSMIT})
    assert pipe.replicated_params == [{"submod_pp_2": "scale", "submod_pp_3": "scale"}]
    for name in ("embedding.weight", "head.weight"):
        assert _cut(TRANSFORMER, 2, {name: TRANSMIT}).replicated_params == []
    assert _cut(TRANSFORMER, 2, {"embedding.weight": REPLICATE}).replicated_params == [
        {"submod_pp_0": "embedding.weight", "submod_pp_1": "embedding.weight"}
    ]


def test_a_frozen_one_travels_without_a_gradient() -> None:
    def frozen() -> nn.Module:
        model = Thrice()
        model.shared.requires_grad_(False)
        return model

    case = replace(THRICE, name="frozen", make=frozen)
    assert_same(piped(_cut(case, 3, TRANSMIT), case), _whole(case, _cut(case, 3, REPLICATE)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"nothing": TRANSMIT}, "names 'nothing', but the model has no such parameter: it has 'embedding.w"),
        ({"embedding.weight": "transmit"}, "is 'transmit': give MultiUseParameterConfig.TRANSMIT or REPLICA"),
        ("transmit", "multi_use_param_spec is 'transmit': give a MultiUseParameterConfig, or a dict"),
        (
            {"embedding.weight": TRANSMIT, "head.weight": REPLICATE},
            "says TRANSMIT for 'embedding.weight' and REPLICATE for 'head.weight', which are one parameter",
        ),
    ],
)
def test_a_spec_that_can_not_be_followed_says_why(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _cut(TRANSFORMER, 2, spec)
