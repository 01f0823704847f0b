"""What training processes report, shown while they run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from partita.demo.events import EventWriter
from partita.demo.watch import Side, train_and_watch


def progress() -> Progress:
    return Progress(console=Console(file=io.StringIO(), width=120))


def test_all_events_are_there_when_the_training_ends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def train() -> None:
        writer = EventWriter(path)
        for step in range(3):
            writer.write("step", step=step, loss=3.0 - step, seconds=0.5)
        writer.write("validation", step=2, loss=0.5)
        writer.write("span", name="0F0")
        writer.close()

    side = train_and_watch(train, progress(), "training", 3, [path])
    assert side.losses == {0: 3.0, 1: 2.0, 2: 1.0}
    assert side.validation == {2: 0.5}
    assert [span["name"] for span in side.spans] == ["0F0"]


def test_each_step_is_compared_with_the_other_training(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def train() -> None:
        writer = EventWriter(path)
        for step in range(2):
            writer.write("step", step=step, loss=1.0, seconds=0.5)
        writer.close()

    bar = progress()
    train_and_watch(train, bar, "training", 2, [path], other=Side(losses={0: 1.0, 1: 1.5}))
    text = bar.console.file.getvalue()  # type: ignore[attr-defined]
    assert "loss cut 1.00000  uncut 1.00000  equal" in text
    assert "loss cut 1.00000  uncut 1.50000  differ by 0.5" in text


def test_an_event_that_can_not_be_shown_is_raised_where_training_was_started(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(KeyError, match="kind"):
        train_and_watch(lambda: path.write_text("{}\n"), progress(), "training", 1, [path])


@pytest.mark.parametrize(("seconds", "expected"), [([9.0, 1.0, 2.0, 4.0], 4.0), ([2.0], 4.0)])
def test_the_first_of_several_steps_does_not_count(seconds: list[float], expected: float) -> None:
    assert Side(seconds=dict(enumerate(seconds))).samples_per_second(8) == expected
