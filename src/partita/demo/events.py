"""Events of a training process, as JSON lines in a file that the command reads while it grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["EventReader", "EventWriter"]


class EventWriter:
    """Appends events to a file, one line each, complete at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Append one event. Values are what JSON can hold."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


class EventReader:
    """Reads the events that have come since the last look; a half-written line is left for the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)
