from __future__ import annotations

import random

import mpmath  # type: ignore[import-untyped]
import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch.ao.quantization import MovingAverageMinMaxObserver

import partita
from partita._torch.export.conditions import Answers, answers_given
from partita._torch.export.users_code import asking_line, is_users


def test_installed_libraries_are_the_users_and_torch_partita_and_python_are_not() -> None:
    assert is_users(__file__)
    assert is_users(pytest.__file__)  # as libraries of models are
    for module in (torch, sympy, mpmath, random, partita):
        assert not is_users(module.__file__)
    assert not is_users("<eval_with_key>.1")


class _Asks(torch.nn.Module):
    def forward(self, lines: list[str | None]) -> None:
        lines.append(asking_line())


def test_the_line_that_asks_is_the_models_own() -> None:
    lines: list[str | None] = []
    _Asks()(lines)
    assert lines[0] is not None
    assert lines[0].startswith(f"lines.append(asking_line())  # {__file__}:")
    assert lines[0].endswith(" in forward")


def test_a_model_of_torchs_modules_alone_asks_in_their_code_and_not_in_the_script_around_it() -> None:
    answers = Answers()
    with answers_given(answers):
        torch.nn.Sequential(MovingAverageMinMaxObserver())(torch.ones(2))
    place = answers.places[0]
    assert "observer.py:" in place
    assert place.endswith(" in forward")
