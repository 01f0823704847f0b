from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.planning import Cluster, StageCost, get_schedule, simulate
from partita.reporting import RunReport, Timeline, TimelineSpan, chrome_trace, simulation_timeline

Event = dict[str, Any]

times = st.floats(0, 1e4)
spans = st.builds(
    lambda rank, stage, kind, microbatch, ends: TimelineSpan(
        rank, f"{stage}{kind}{microbatch}", kind, stage, microbatch, min(ends), max(ends)
    ),
    st.integers(0, 5),
    st.none() | st.integers(0, 5),
    st.sampled_from(["F", "B", "I", "W", "comm", "idle", "other"]),
    st.none() | st.integers(0, 5),
    st.tuples(times, times),
)


def events(*timelines: Timeline, **options: bool) -> list[Event]:
    tree = json.loads(chrome_trace(timelines, **options))
    assert isinstance(tree["traceEvents"], list)
    return tree["traceEvents"]


@given(st.lists(spans, max_size=20).map(lambda made: Timeline.from_spans("t", made)))
def test_every_event_is_as_the_format_asks(timeline: Timeline) -> None:
    found = events(timeline)
    for event in found:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in {"M", "X", "s", "f"}
        if event["ph"] == "M":
            continue
        assert event["cat"]
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    timed = [event["ts"] for event in found if event["ph"] != "M"]
    assert timed == sorted(timed)
    busy = [span for span in timeline.spans if span.kind != "idle"]
    assert len([event for event in found if event["ph"] == "X"]) == len(busy)


def test_measured_and_simulated_are_two_processes_with_a_thread_a_rank(report: RunReport) -> None:
    found = events(report.measured, report.simulated)
    named = [(event["pid"], event["args"]["name"]) for event in found if event["name"] == "process_name"]
    assert named == [(0, "Measured"), (1, "Simulated")]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found
        if event["name"] == "thread_name"
    }
    assert [threads[0, rank] for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]
    assert {(event["pid"], event["tid"]) for event in found if event["ph"] == "X"} == set(threads)


def test_a_span_is_one_complete_event_in_microseconds() -> None:
    span = TimelineSpan(1, "3B2", "B", 3, 2, 0.001, 0.0035)
    (event,) = [one for one in events(Timeline.from_spans("t", [span])) if one["ph"] == "X"]
    assert (event["name"], event["cat"]) == ("stage 3 backward, microbatch 2", "backward")
    assert (event["ts"], event["dur"], event["tid"]) == (1000.0, 2500.0, 1)
    assert event["args"] == {"action": "3B2", "rank": 1, "stage": 3, "microbatch": 2}


def test_events_of_a_thread_never_overlap_in_part(report: RunReport) -> None:
    # Communication overlaps computation, which a viewer can't show on one thread.
    found = [event for event in events(report.measured, report.simulated) if event["ph"] == "X"]
    for thread in {(event["pid"], event["tid"]) for event in found}:
        ends = 0.0
        for event in found:
            if (event["pid"], event["tid"]) == thread:
                assert event["ts"] >= ends - 0.002
                ends = event["ts"] + event["dur"]


def test_arrows_go_forward_in_time_between_slices_of_different_ranks(report: RunReport) -> None:
    found = events(report.measured)
    slices = [event for event in found if event["ph"] == "X"]
    tails = {event["id"]: event for event in found if event["ph"] == "s"}
    heads = {event["id"]: event for event in found if event["ph"] == "f"}
    assert tails.keys() == heads.keys()
    assert len(tails) == 2 * 8 * 2  # two borders, eight microbatches, there and back
    for number, tail in tails.items():
        head = heads[number]
        assert tail["tid"] != head["tid"]
        assert tail["ts"] <= head["ts"]
        for end in (tail, head):
            assert any(
                one["tid"] == end["tid"] and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
                for one in slices
            )


def test_messages_that_overlap_in_part_get_threads_of_their_own() -> None:
    # A rank sends to both of its neighbours at once, over two links.
    ends = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]
    messages = [
        TimelineSpan(1, f"1SEND_F{number}", "comm", 1, number, *times) for number, times in enumerate(ends)
    ]
    found = events(Timeline.from_spans("t", messages))
    lanes = [event["tid"] for event in found if event["ph"] == "X"]
    assert lanes[0] == lanes[2] != lanes[1]
    names = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert names == ["rank 1 comm", "rank 1 comm 2"]


def test_memory_is_a_counter_of_each_rank() -> None:
    costs = [StageCost(1.0, 2.0, activation_bytes=8, send_bytes=1)] * 2
    step = simulate(get_schedule("1F1B")(2, 2), costs, Cluster(2, 2.0))
    timeline = simulation_timeline(step, transfers=True)
    tree = json.loads(chrome_trace([timeline], memory=[dict(enumerate(step.memory))]))
    counters = [event for event in tree["traceEvents"] if event["ph"] == "C"]
    first = [(event["ts"], event["args"]["bytes"]) for event in counters if event["name"] == "rank 1 memory"]
    assert first == [(time_s * 1e6, size) for time_s, size in step.memory[1]]
    assert max(size for _, size in first) == step.peak_bytes[1]
    assert {event["cat"] for event in tree["traceEvents"] if event["ph"] == "X"} >= {"forward", "backward"}
    assert sum(" sends " in event["name"] for event in tree["traceEvents"]) == 4


def test_arrows_can_be_left_out(report: RunReport) -> None:
    assert not [event for event in events(report.measured, arrows=False) if event["ph"] in "sf"]


@pytest.mark.parametrize("timelines", [(), (Timeline("t", (), 0.0, 0.0),)])
def test_nothing_to_show_is_still_a_trace(timelines: tuple[Timeline, ...]) -> None:
    assert not [event for event in events(*timelines) if event["ph"] != "M"]
