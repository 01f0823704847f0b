"""``partita explain``, as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.reporting.step.test_html import Page
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import CaptureError, UsageError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is used where there is one")

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x).relu().sin().cos().tanh()
        scale = hidden.sum().cpu()
        print("inside of the model")
        return self.last(hidden * scale.to(x.device)).sin().cos()


def build():
    return Net(), (torch.ones(2, 4),)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    Path("model.py").write_text(MODEL)
    return "model.py:build"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tables_say_what_is_captured_and_what_not_and_why(place: str) -> None:
    text = run(place, "--for", "cudagraphs")
    assert "There is no CUDA device here, so the model was not run" in " ".join(text.split())
    assert "region_0 on cuda:0" in text
    assert "model.py:13: scale = hidden.sum().cpu()" in text
    assert "its result lies on cpu" in text
    assert "torch.compile ends a graph" in text
    assert "launches saved a run" in text


def test_json_holds_the_same_and_nothing_that_the_model_prints(place: str) -> None:
    report = json.loads(run(place, "--train", "--json"))
    assert report["stopped"] == ""
    assert report["assumed"] is True
    names = [graph["name"] for graph in report["graphs"]]
    assert "forward 0" in names
    assert "backward 0" in names
    assert report["launches_saved"] == sum(graph["launches_saved"] for graph in report["graphs"]) > 0
    assert report["breaks"][0]["source"].startswith("model.py:14")


def test_the_page_is_written_and_needs_nothing_else(place: str) -> None:
    assert "wrote out/page.html" in run(place, "--html", "out/page.html", "--device", "cpu")
    page = Page(Path("out/page.html").read_text(encoding="utf-8"))
    assert "Judged for ReplayRecorder" in page.words
    assert "region_0 on cpu" in page.words


def test_the_page_says_what_is_saved_and_what_is_not_captured_and_why(place: str) -> None:
    run(place, "--html", "out/page.html")
    words = " ".join(Page(Path("out/page.html").read_text(encoding="utf-8")).words.split())
    report = json.loads(run(place, "--json"))
    assert f"Launches saved a run{report['launches_saved']} " in words
    left_out = [item for graph in report["graphs"] for item in graph["left_out"]]
    assert {item["source"] for item in left_out} >= {"model.py:13: scale = hidden.sum().cpu()"}
    for item in [*left_out, *report["breaks"]]:
        for what in ("source", "reason", "way_out"):
            assert " ".join(item[what].split()) in words


def test_fewer_launches_than_asked_for_are_not_captured(place: str) -> None:
    report = json.loads(run(place, "--json", "--min-launches", "1000"))
    assert report["launches_saved"] == 0
    assert all(not region["captured"] for graph in report["graphs"] for region in graph["regions"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("--for", "ddp"), UsageError, "--for is 'ddp': there is 'cudagraphs'"),
        (("--min-launches", "-1"), UsageError, "--min-launches is -1: give 0 or more"),
        (("--allow", "mine"), UsageError, "write operators as namespace::name"),
        (("--device", "tpu"), CaptureError, "device is 'tpu'"),
    ],
)
def test_options_that_can_not_be_used_are_refused(
    place: str, options: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(place, *options)
