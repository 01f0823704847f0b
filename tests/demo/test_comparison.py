"""The demo's proof."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from partita.demo.comparison import compare_parameters
from partita.errors import ExecutionError


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def test_equal_states_are_equal_bit_for_bit(tmp_path: Path) -> None:
    a, b = torch.randn(3), torch.randn(2, 2)
    result = compare_parameters(
        saved(tmp_path / "u", a=a, b=b), [saved(tmp_path / "0", a=a), saved(tmp_path / "1", a=a, b=b)]
    )
    assert (result.largest, result.where, result.bitwise, result.compared) == (0.0, "", True, 10)


def test_the_largest_difference_is_found(tmp_path: Path) -> None:
    a, b = torch.zeros(3), torch.zeros(2)
    result = compare_parameters(
        saved(tmp_path / "u", a=a, b=b), [saved(tmp_path / "0", a=a + 1e-3, b=b + 0.5)]
    )
    assert (result.largest, result.where, result.bitwise) == (0.5, "b", False)


def test_minus_zero_is_no_bitwise_zero(tmp_path: Path) -> None:
    result = compare_parameters(
        saved(tmp_path / "u", a=torch.zeros(1)), [saved(tmp_path / "0", a=-torch.zeros(1))]
    )
    assert (result.largest, result.bitwise) == (0.0, False)


def test_a_parameter_that_no_rank_holds_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="no rank holds 'b'"):
        compare_parameters(
            saved(tmp_path / "u", a=torch.zeros(1), b=torch.zeros(1)),
            [saved(tmp_path / "0", a=torch.zeros(1))],
        )
