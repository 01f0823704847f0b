from __future__ import annotations

from pathlib import Path

import pytest

from partita.cli.options.saved_costs import SavedCosts, refuse_model_options
from partita.errors import PlanError, UsageError
from partita.planning import CostedFor, CostModel, Unit, get_device

MEASURED = CostModel((Unit("a", 0.001, 0.002), Unit("b", 0.001, 0.002)), (16,))
OF_H100 = CostModel(MEASURED.units, (16,), costed_for=CostedFor("H100", "bfloat16", 989.5e12))


def saved(folder: Path, costs: CostModel) -> Path:
    path = folder / "costs.json"
    path.write_text(costs.to_json())
    return path


def test_costs_of_one_device_are_taken_for_another_by_its_speed(tmp_path: Path) -> None:
    """They kept the seconds of the device that they were made for, whichever was planned for."""
    read = SavedCosts.read(saved(tmp_path, OF_H100), get_device("A100"))
    assert read.costs.units[0].forward_s == pytest.approx(0.001 * 989.5 / 312)
    assert read.dtype == "bfloat16"
    assert read.seconds == (
        "worked out for H100; A100 is taken to be 0.315 times as fast, as it is with products of matrices in "
        "bfloat16 (name the model to work them out for it)"
    )


def test_costs_of_the_same_device_are_as_they_were(tmp_path: Path) -> None:
    assert SavedCosts.read(saved(tmp_path, OF_H100), get_device("H100")) == SavedCosts(
        OF_H100, "bfloat16", ""
    )


def test_costs_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(MEASURED.to_json(), encoding="utf-8-sig")
    assert SavedCosts.read(path, None).costs == MEASURED


def test_what_is_not_known_of_seconds_is_said(tmp_path: Path) -> None:
    path = saved(tmp_path, MEASURED)
    words = f"as {path} has them, taken for those of A100"
    assert SavedCosts.read(path, get_device("A100")) == SavedCosts(MEASURED, None, words)
    assert SavedCosts.read(path, None) == SavedCosts(MEASURED, None, "")
    path = saved(tmp_path, OF_H100)
    assert SavedCosts.read(path, None).seconds == f"those of H100, which {path} was worked out for"


def test_a_file_that_cannot_be_read_and_options_of_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't be read .* give a saved cost model, or a model"):
        SavedCosts.read(tmp_path / "none.json", None)
    with pytest.raises(UsageError, match=r"--batch is given with costs.json, costs that were saved"):
        refuse_model_options("costs.json", {"--set": None, "--batch": 2})
    with pytest.raises(UsageError, match=r"--batch is given with costs.json"):  # it was left out silently
        refuse_model_options("costs.json", {"--set": None, "--batch": 0})


def test_a_configuration_in_place_of_costs_is_told_how_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(
        PlanError, match=r"config.json holds no costs \(.*\): .* as --config-json .*config.json$"
    ):
        SavedCosts.read(path, None)
