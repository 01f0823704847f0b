"""The event files that training processes write while the command reads."""

from __future__ import annotations

from pathlib import Path

from partita.demo.events import EventReader, EventWriter


def test_a_reader_sees_each_event_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert list(reader.new()) == []
    writer = EventWriter(path)
    writer.write("step", step=0, loss=1.5)
    assert list(reader.new()) == [{"kind": "step", "step": 0, "loss": 1.5}]
    writer.write("step", step=1, loss=1.0)
    writer.write("done")
    assert [event["kind"] for event in reader.new()] == ["step", "done"]
    assert list(reader.new()) == []
    writer.close()


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "st')
    reader = EventReader(path)
    assert list(reader.new()) == []
    with path.open("a") as file:
        file.write('ep"}\n')
    assert list(reader.new()) == [{"kind": "step"}]
