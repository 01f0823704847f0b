"""``partita split``, as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from tests.cli.user_models import MODELS
from tests.reporting.step.test_html import Page
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import InfeasiblePlan, ModuleNameError, PartitaError, UsageError

CUTS = ("--split-at", "layers.1", "--split-at", "norm")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("model.py").write_text(MODELS)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["split", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return answer


@pytest.mark.dear
def test_from_the_shell_stages_are_shown_and_too_many_are_one_line() -> None:
    command = [sys.executable, "-m", "partita", "split", "model.py:counted"]
    result = subprocess.run(
        [*command, "--split-at", "b"], capture_output=True, text=True, check=False, timeout=170
    )
    assert result.returncode == 0, result.stderr
    assert "stage 0" in result.stdout
    assert "proven: equal to the eager model bit for bit" in result.stdout
    many = subprocess.run(
        [*command, "--stages", "99"], capture_output=True, text=True, check=False, timeout=170
    )
    assert many.returncode == 1
    assert many.stderr.splitlines()[-1].startswith("InfeasiblePlan: 99 stages were asked for")


def test_stages_have_modules_parameters_and_what_crosses() -> None:
    answer = as_json("model.py:tied", *CUTS)
    first, second, third = answer["stages"]
    assert [stage["modules"] for stage in answer["stages"]] == [
        ["embed", "layers.0"],
        ["layers.1-2"],
        ["norm", "head"],
    ]
    assert (first["parameters"], first["parameter_bytes"]) == (50 * 16 + 16 * 17, 4 * (50 * 16 + 16 * 17))
    assert second["parameters"] == 2 * 16 * 17
    assert third["buffer_bytes"] == 2 * 6 * 4 + 8
    activation = 2 * 6 * 16 * 4
    crossings = {(row["sender"], row["receiver"]): row for row in answer["crossings"]}
    assert set(crossings) == {(0, 1), (1, 2), (0, 2)}
    assert crossings[0, 1]["forward_bytes"] == crossings[0, 1]["backward_bytes"] == activation
    # The embedding goes past stage 1 with the mask, and the tied weight's gradient comes back with its own.
    assert crossings[0, 2]["forward_bytes"] == activation + 2 * 6 * 4
    assert crossings[0, 2]["backward_bytes"] == activation + 50 * 16 * 4
    (tied,) = answer["tied"]
    assert ({*tied["names"]}, tied["stages"]) == ({"embed.weight", "head.weight"}, [0, 2])


def test_the_terminal_shows_a_table_and_a_drawing() -> None:
    lines = run("model.py:tied", *CUTS).splitlines()
    assert any("│ embed, layers.0 " in line for line in lines)
    assert any(line.startswith("●┌  stage 0     1.07 k  embed, layers.0") for line in lines)
    assert any(line.startswith("││            768 B on, 768 B back: ") for line in lines)
    assert any(line.startswith("││            from stage 0: 816 B on, 3.88 KiB back") for line in lines)
    assert any(line.startswith("●└  stage 2") for line in lines)
    assert "tied: embed.weight = head.weight in stages 0, 2 (3.12 KiB)" in lines
    assert all(len(line) <= 100 for line in lines if line.startswith(("│", "●", "┃")))


def test_piped_output_has_all_of_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was cut to 80 columns where the output was no terminal."""
    monkeypatch.delenv("COLUMNS")
    (line,) = (line for line in run("model.py:tied", *CUTS).splitlines() if "from stage 0" in line)
    assert line.endswith("parameter:embed.weight: float32[50, 16]")


def test_a_page_and_a_picture_are_written() -> None:
    text = run("model.py:tied", "--stages", "2", "--html", "out/split.html", "--svg", "out/split.svg")
    assert "wrote out/split.html" in text
    page = Page(Path("out/split.html").read_text())
    assert "partita split" in page.words
    picture = ET.parse("out/split.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert [node.text for node in picture.iter() if (node.text or "").startswith("stage ")] == [
        "stage 0",
        "stage 1",
    ]


def test_a_large_model_is_cut_without_memory() -> None:
    settings = ("n_layer=4", "n_embd=4096", "n_head=8")
    options = [argument for setting in settings for argument in ("--set", setting)]
    answer = as_json("hf:gpt2", *options, "--stages", "2", "--sequence", "8")
    assert sum(stage["parameters"] for stage in answer["stages"]) > 10**9
    assert answer["note"].startswith("cut on the meta device")


def test_a_file_is_cut_without_memory_on_wish() -> None:
    straight, without = (as_json("model.py:counted", "--split-at", "b", *more) for more in ((), ("--meta",)))
    assert straight["stages"] == without["stages"]
    assert straight["crossings"] == without["crossings"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ((), UsageError, "there is neither --stages nor --split-at: give --stages 2"),
        (("--stages", "0"), UsageError, "--stages is 0: give 1 or more"),
        (
            ("--stages", "99"),
            InfeasiblePlan,
            "99 stages were asked for, but this model can be cut into at most",
        ),
        (("--split-at", "layers.7"), ModuleNameError, "ModuleList has no submodule '7'; it has 0, 1, 2"),
        (("--stages", "2", "--html", "."), UsageError, "--html is ., a folder: give a file"),
        (("--stages", "2", "--html", "x", "--svg", "x"), UsageError, "--html and --svg are both x"),
        (("--stages", "2", "--dtype", "float32"), UsageError, "--dtype is for Hugging Face models"),
    ],
)
def test_what_can_not_be_used_is_one_line(
    options: tuple[str, ...], error: type[PartitaError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        run("model.py:tied", *options)
    assert len(str(raised.value).splitlines()) == 1
