from __future__ import annotations

import time

import pytest

from partita.runtime import (
    NULL_TRACER,
    Comm,
    InProcessWorld,
    TraceEvent,
    Tracer,
    align,
    gather,
    measure_clock_offsets,
    trace,
)


def test_a_span_is_recorded_with_its_times_and_arguments_also_where_it_raises() -> None:
    tracer = Tracer(rank=2)
    before = time.monotonic()
    with pytest.raises(ValueError, match="inside"), tracer.span("2F0", "compute", stage=2):
        raise ValueError("inside")
    tracer.add("send", "communication", 1.0, 3.0, bytes=8)
    compute, send = tracer.events
    assert (compute.name, compute.category, compute.rank, compute.args) == ("2F0", "compute", 2, {"stage": 2})
    assert before <= compute.start_s <= compute.end_s <= time.monotonic()
    assert send == TraceEvent("send", "communication", 2, 1.0, 3.0, {"bytes": 8})
    assert send.duration_s == 2.0


def test_the_null_tracer_records_nothing() -> None:
    with NULL_TRACER.span("2F0", "compute", stage=2):
        NULL_TRACER.add("send", "communication", 1.0, 3.0)
    assert NULL_TRACER.events == ()


def test_an_event_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"late ends \(1.0 s\) before it starts \(2.0 s\)"):
        TraceEvent("late", "compute", 0, 2.0, 1.0)


def test_aligned_events_stand_on_the_clock_of_rank_0_in_order() -> None:
    events = [TraceEvent("b", "x", 1, 105.0, 106.0), TraceEvent("a", "x", 0, 5.5, 6.0)]
    assert [(e.name, e.start_s, e.end_s) for e in align(events, [0.0, 100.0])] == [
        ("b", 5.0, 6.0),
        ("a", 5.5, 6.0),
    ]


def test_ranks_of_one_host_share_a_clock_and_gather_each_others_events() -> None:
    def fn(comm: Comm) -> list[str]:
        tracer = Tracer(comm.rank)
        tracer.add(f"of {comm.rank}", "compute", 10.0 - comm.rank, 11.0)
        assert measure_clock_offsets(comm) == (0.0,) * 3
        return [event.name for event in gather(comm, tracer)]

    assert InProcessWorld(3).run(fn) == [["of 2", "of 1", "of 0"]] * 3


def test_another_hosts_clock_is_measured_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 pretends to be elsewhere, with a clock 1000 s ahead."""

    class Clock:
        def __init__(self) -> None:
            self.ahead_s = 0.0

        def monotonic(self) -> float:
            return time.monotonic() + self.ahead_s

    clock = Clock()
    monkeypatch.setattr(trace, "time", clock)
    hosts = iter(["here", "there", "here"])
    monkeypatch.setattr(trace, "_host", lambda: next(hosts))

    def fn(comm: Comm) -> tuple[float, ...]:
        if comm.rank == 1:
            original = comm.send_object

            def send_ahead(obj: object, dst: int) -> None:
                original(obj + 1000.0 if isinstance(obj, float) else obj, dst)

            monkeypatch.setattr(comm, "send_object", send_ahead)
        return measure_clock_offsets(comm)

    offsets = InProcessWorld(3).run(fn)
    assert offsets[0] == offsets[1] == offsets[2]
    assert offsets[0][0] == offsets[0][2] == 0.0
    assert offsets[0][1] == pytest.approx(1000.0, abs=5.0)
