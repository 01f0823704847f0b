"""Where ``torch.compile`` ends a graph, or leaves a function to Python, as Dynamo reports it in its log.

Dynamo says so in one place only, the log that ``TORCH_LOGS=graph_breaks`` prints. A graph's own record of
why it ended lacks what made no graph at all: a break within a loop, a ``try`` or a ``with`` that can't be
resumed.
"""

from __future__ import annotations

import linecache
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

__all__ = ["Break", "recorded_breaks"]

_BREAK_LOGS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
_LIMIT_LOG = "torch._dynamo.convert_frame"
_PLACE = re.compile(r"Graph break (?:\(.*?\) )?in user code at (?P<file>.+):(?P<line>\d+)$", re.MULTILINE)
_REASON = re.compile(
    r"^Graph Break Reason: (?P<reason>.*?)"
    r"(?=\n\n?(?:Stack variable source attribution|User code traceback):|\Z)",
    re.DOTALL | re.MULTILINE,
)
_SKIPPED = re.compile(r"frame skipped: (?P<name>\S+) \((?P<file>.+) line (?P<line>\d+)\)")
_LIMIT = re.compile(
    r"hit config\.(?P<limit>\w+) \((?P<value>\d+)\)\s+function: '(?P<place>.*?)\)\n", re.DOTALL
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OWN_CODE = "/torch/_dynamo/"
_OTHER_BREAK = "*** While handling this graph break"


@dataclass(frozen=True)
class Break:
    """Where a graph ends, because Dynamo could not go on.

    Attributes:
        reason: Dynamo's, in one line.
        hint: Dynamo's first hint, or an empty string.
        source: ``file:line: code``, or an empty string.
        skipped: whether no graph follows: the function, or what is left of it, runs as Python, and only the
            functions that it calls are tried anew.
        details: all that Dynamo says of it, in many lines.
    """

    reason: str
    hint: str
    source: str
    skipped: bool = False
    details: str = ""


@contextmanager
def recorded_breaks() -> Iterator[list[Break]]:
    """Yield a list that grows by each break that this thread's tracing meets. Nothing is printed of them."""
    breaks: list[Break] = []
    recorder = _BreakRecorder(breaks, threading.get_ident())
    with ExitStack() as stack:
        for name in (*_BREAK_LOGS, _LIMIT_LOG):
            stack.enter_context(_recorded(logging.getLogger(name), recorder))
        yield breaks


@contextmanager
def _recorded(logger: logging.Logger, recorder: logging.Handler) -> Iterator[None]:
    """Give a log's records to the recorder; who listens already goes on listening."""
    level, listeners, propagates = logger.level, tuple(logger.handlers), logger.propagate
    breaks_are_wanted = logger.isEnabledFor(logging.DEBUG)
    if logger.name in _BREAK_LOGS and not breaks_are_wanted:
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    logger.addHandler(recorder)
    try:
        yield
    finally:
        logger.removeHandler(recorder)
        logger.setLevel(level)
        logger.propagate = propagates
        assert tuple(logger.handlers) == listeners


class _BreakRecorder(logging.Handler):
    def __init__(self, breaks: list[Break], thread: int) -> None:
        super().__init__(logging.DEBUG)
        self._breaks = breaks
        self._thread = thread

    def emit(self, record: logging.LogRecord) -> None:
        """Turn a record that is about a break into one."""
        if record.thread != self._thread:
            return
        text = record.getMessage()
        item = _limit(text) if record.name == _LIMIT_LOG else _break(text)
        if item is not None:
            self._breaks.append(item)


def _break(text: str) -> Break | None:
    place, reason = _PLACE.search(text), _REASON.search(text)
    if place is None or reason is None:
        return None
    introduction, said = _parts(reason["reason"])
    skipped = "falling back to eager" in introduction or "skipping the rest" in introduction
    cause = said.partition(_OTHER_BREAK)[0]
    headline, explanation, hint = _summary(cause)
    words = headline if not explanation else f"{headline}: {explanation}"
    consequence = _consequence(introduction, said) if skipped else ""
    source = "" if _OWN_CODE in place["file"] else _source_line(place["file"], int(place["line"]))
    return Break(_ADDRESS.sub("", words) + consequence, hint, source, skipped, said.strip())


def _parts(reason: str) -> tuple[str, str]:
    """What Dynamo did, in a sentence, and why."""
    introduction, blank, said = reason.partition("\n\n")
    return (introduction, said) if blank else ("", reason)


def _summary(cause: str) -> tuple[str, str, str]:
    """Dynamo's headline, its explanation, and the first thing that it advises."""
    lines = [line.strip() for line in cause.splitlines() if line.strip()]
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    headline = lines[0].rstrip(".") if lines else "torch.compile gives no reason"
    return headline, fields.get("Explanation", "").rstrip("."), fields.get("Hint", "").rstrip(".")


def _consequence(introduction: str, said: str) -> str:
    frame = _SKIPPED.search(said)
    in_loop = "graph break in loop" in said
    name = f"{frame['name']}()" if frame is not None else "the function"
    if "skipping the rest" in introduction:
        return f"; the rest of {name} runs as Python"
    return (
        f"; as it lies in a loop, all of {name} runs as Python"
        if in_loop
        else f"; all of {name} runs as Python"
    )


def _limit(text: str) -> Break | None:
    limit = _LIMIT.search(text)
    if limit is None:
        return None
    name, _, place = limit["place"].partition("' (")
    file, _, line = place.rpartition(":")
    return Break(
        f"{name}() was compiled {limit['value']} times ({limit['limit']}), and runs as Python from then on",
        "look for what differs from call to call with TORCH_LOGS=recompiles",
        _source_line(file, int(line)) if line.isdigit() else place,
        skipped=True,
        details=text.strip(),
    )


def _source_line(file: str, line: int) -> str:
    code = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f": {code}" if code else "")
