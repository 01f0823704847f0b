from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from partita.capture.tracing.blame import summary, users_line


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def _error(rows: int) -> BaseException:
    try:
        Model()(torch.zeros(2, rows))
    except RuntimeError as error:
        return error
    raise AssertionError


def test_the_line_is_the_users_and_not_one_of_torchs_modules() -> None:
    line = users_line(_error(3))
    assert line.startswith("return self.a(x)  # ")
    assert "test_blame.py" in line
    assert line.endswith(" in forward")


def test_a_summary_is_the_first_line_of_the_message_and_the_users_line() -> None:
    text = summary(_error(3))
    assert text.startswith("mat1 and mat2 shapes cannot be multiplied")
    assert "(at return self.a(x)  # " in text
    assert "\n" not in text


def test_an_error_without_a_message_or_a_user_is_told_by_its_kind() -> None:
    assert users_line(ValueError()) == ""
    assert summary(ValueError()) == "ValueError"


def test_code_of_pythons_own_library_is_not_the_users() -> None:
    try:
        random.Random(0).sample([1, 2], 3)
    except ValueError as error:
        line = users_line(error)
    assert "test_blame.py" in line
