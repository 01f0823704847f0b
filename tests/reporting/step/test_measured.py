from __future__ import annotations

import pytest

from partita.errors import ReportError
from partita.reporting import TimelineSpan, measured_timeline
from partita.runtime import TraceEvent


def test_waiting_is_no_computing_and_a_message_ends_where_its_receiver_goes_on() -> None:
    timeline = measured_timeline(
        [
            TraceEvent("0F0", "compute", 0, 10.0, 11.0),
            TraceEvent("0SEND_F0", "comm", 0, 11.0, 11.5),
            TraceEvent("1F0", "compute", 1, 10.0, 13.0),
            TraceEvent("wait 1F0", "wait", 1, 10.0, 12.0),
        ]
    )
    assert sorted(timeline.spans, key=lambda span: (span.rank, span.start_s, span.kind)) == [
        TimelineSpan(0, "0F0", "F", 0, 0, 0.0, 1.0),
        TimelineSpan(0, "0SEND_F0", "comm", 0, 0, 1.0, 2.0),
        TimelineSpan(0, "0SEND_F0", "handling", 0, 0, 1.0, 1.5),
        TimelineSpan(1, "wait 1F0", "idle", 1, 0, 0.0, 2.0),
        TimelineSpan(1, "1F0", "F", 1, 0, 2.0, 3.0),
    ]
    assert timeline.makespan_s == 3.0
    assert timeline.bubble == pytest.approx(1 - 2 / 6)


def test_a_message_that_nobody_waited_for_is_left_out() -> None:
    events = [TraceEvent("0SEND_F0", "comm", 0, 0.0, 0.5), TraceEvent("1F0", "compute", 1, 2.0, 3.0)]
    assert [span.kind for span in measured_timeline(events).spans] == ["handling", "F"]


def test_a_trace_without_events_is_refused() -> None:
    with pytest.raises(ReportError, match="no events were recorded: give the schedule a Tracer"):
        measured_timeline([])
