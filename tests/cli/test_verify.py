"""``partita verify``, as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.user_models import MODELS
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import InfeasiblePlan, ModuleNameError, PartitaError, ScheduleError, UsageError


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODELS)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["verify", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


def test_from_the_shell_a_cut_model_is_equal() -> None:
    command = [sys.executable, "-m", "partita", "verify", "model.py:counted"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("model.py:counted, 2 stages\ntraining mode: equal bit for bit\n")
    assert result.stdout.endswith("\nequal\n")


def test_tied_parameters_dropout_and_buffers_are_equal_under_a_schedule() -> None:
    options = ("--split-at", "layers.1", "--split-at", "head", "--schedule", "gpipe", "--microbatches", "3")
    answer = json.loads(run("model.py:tied", *options, "--json"))
    assert answer["equal"] is True
    assert [check["name"] for check in answer["checks"]] == [
        "training mode",
        "evaluation mode",
        "a step of 3 microbatches under GPipe on 3 ranks",
    ]
    assert answer["checks"][0]["compared"]["gradients of parameters"] > 0
    assert [check["differences"] for check in answer["checks"]] == [[], [], []]


def test_a_schedule_with_two_stages_a_rank_has_four_where_nobody_says() -> None:
    text = run("model.py:tied", "--schedule", "ZBVZeroBubble")
    assert text.startswith("model.py:tied, 4 stages\n")
    assert "a step of 4 microbatches under ZBVZeroBubble on 2 ranks: equal bit for bit" in text


def test_a_model_without_gradients_is_compared_forward_only() -> None:
    text = run("model.py:frozen", "--microbatches", "1")
    assert "a step of 1 microbatch under 1F1B on 2 ranks: equal bit for bit" in text
    assert "nothing that the model returns has a gradient" in text


def test_compile_doubles_a_gradient_that_the_cut_model_has_right() -> None:
    # Autograd has no history for a buffer that a compiled graph changes: the product is derived as twice.
    answer = json.loads(run("model.py:counted", "--compile", "aot_eager", "--json", status=1))
    assert answer["equal"] is False
    (first, *_) = answer["checks"][0]["differences"]
    assert first["where"] == "gradient of a.weight"
    text = run("model.py:counted", "--compile", "aot_eager", status=1)
    assert text.endswith("different in training mode, evaluation mode\n")
    assert "made" not in text  # what the model prints is no part of the answer


def test_compile_that_changes_nothing_is_equal() -> None:
    assert run("model.py:tied", "--compile", "aot_eager").endswith("\nequal\n")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("model.py:tied", "--stages", "0"), UsageError, "--stages is 0: give 1 or more"),
        (("model.py:tied", "--stages", "2", "--split-at", "head"), UsageError, "--split-at says it too"),
        (("model.py:tied", "--split-at", "nose"), ModuleNameError, "Tied has no submodule 'nose'; it has"),
        (
            ("model.py:tied", "--split-at", "embed"),
            UsageError,
            "makes 1 stage and not 2: nothing is computed",
        ),
        (("model.py:tied", "--schedule", "1F2B"), ScheduleError, "there is no schedule '1F2B'"),
        (("model.py:tied", "--schedule", "ForwardOnly"), UsageError, "ForwardOnly, which has no backward"),
        (("model.py:tied", "--stages", "3", "--schedule", "VMin"), UsageError, "give --stages 4, or 1F1B"),
        (("model.py:tied", "--microbatches", "-1"), UsageError, "--microbatches is -1: .* or 0 for no step"),
        (("model.py:tied", "--compile", "gcc"), UsageError, "--compile is 'gcc': give aot_eager or inductor"),
        (("model.py:tied", "--rtol", "0.1"), UsageError, "--rtol is 0.1, but stages are compared bit for"),
        (
            ("model.py:tied", "--compile", "inductor", "--rtol", "2"),
            UsageError,
            "--rtol is 2.0: give a number from 0 to 1",
        ),
        (
            ("model.py:tied", "--compile", "inductor", "--microbatches", "0"),
            UsageError,
            "--microbatches is given with --compile",
        ),
        (("model.py:nobody",), UsageError, "model.py has no 'nobody': it defines"),
        (("model.py:tied", "--batch", "4"), UsageError, "--batch is for Hugging Face models"),
        (("model.py:broken", "--compile", "aot_eager"), UsageError, "can't run its own example in training"),
        (("model.py:bare",), UsageError, "is on the meta device or fake, and can't run: make it with values"),
        (("model.py:bare", "--compile", "aot_eager"), UsageError, "make it with values, on the CPU"),
        (("model.py:table",), UsageError, r"args\[0\] has 2, args\[1\] has 12.* --microbatches 0"),
        (("model.py:tied", "--stages", "99"), InfeasiblePlan, "99 stages were asked for"),
    ],
)
def test_what_can_not_be_used_is_one_line(
    options: tuple[str, ...], error: type[PartitaError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        run(*options)
    assert len(str(raised.value).splitlines()) == 1


def test_the_advice_for_arguments_without_a_batch_works() -> None:
    text = run("model.py:table", "--microbatches", "0")
    assert text.endswith("\nequal\n")
    assert "a step of" not in text
