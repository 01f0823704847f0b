"""``partita simulate``, as it is called."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import PartitaError, PlanError, ScheduleError, UsageError
from partita.planning import (
    CostModel,
    Plan,
    Schedule,
    Unit,
    get_schedule,
    plan_stages,
    schedule_names,
    schedule_of,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return answer


def example_plan(schedule: str = "1F1B", stages: int = 2) -> Plan:
    units = tuple(Unit(f"block{n}", 0.001, 0.002, 10, 5, activation_bytes=100) for n in range(8))
    return plan_stages(CostModel(units, (8,) * 7), stages, schedule=schedule, microbatches=4)


def test_all_schedules_are_compared_the_fastest_first() -> None:
    answer = as_json("--ranks", "4", "--microbatches", "8", "--f", "1ms")
    rows = answer["schedules"]
    assert {row["schedule"] for row in rows} == {*schedule_names()} - {"ForwardOnly"}
    assert [row["makespan_s"] for row in rows] == sorted(row["makespan_s"] for row in rows)
    assert answer["best"] == rows[0]["schedule"]
    v_half = next(row for row in rows if row["schedule"] == "VHalf")
    # The paper's figures are for F = I = W = 1 of each of two stages a rank.
    assert v_half["makespan_s"] == pytest.approx(53 / 2 * 1e-3)
    assert v_half["bubble"] == pytest.approx(0.0943, abs=5e-5)
    assert v_half["peak"] == 3


def test_a_narrow_terminal_has_fewer_columns_with_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 columns most of the table was lines without numbers between them."""
    monkeypatch.setenv("COLUMNS", "40")
    text = run("--ranks", "4", "--microbatches", "8", "--f", "1ms")
    assert "┃┃" not in text
    assert re.search(r"│ Interleaved1F1B +│ +[0-9.]+ ms │", text)
    assert "no room for: " in text


def test_the_table_has_both_bubbles_and_the_drawing_a_lane_a_rank() -> None:
    text = run("--ranks", "2", "--microbatches", "4", "--schedule", "zbh1", "--f", "1ms")
    assert re.search(r"ZBH1 +│ +2 │ 13.0 ms │ +7.7 % │ 13.0 ms │ +7.7 % │ +2 microbatches", text)
    assert re.search(r"^rank 0  F0-+F1-+\.+I0", text, re.MULTILINE)
    assert "F forward  I gradient of inputs  W gradient of weights  0 microbatch" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_memory_limit_is_told_and_what_fits_comes_first() -> None:
    answer = as_json("--ranks", "8", "--microbatches", "32", "--memory", "5")
    fits = [row["fits"] for row in answer["schedules"]]
    assert fits == sorted(fits, reverse=True)
    assert answer["best"] == "VHalf"
    assert answer["schedules"][0]["bubble"] <= 0.0814
    assert "a rank may hold 5 microbatches" in run(
        "--ranks", "8", "--memory", "5", "--schedule", "VHalf,1F1B"
    )


def test_sizes_make_memory_bytes() -> None:
    answer = as_json("--ranks", "2", "--activation", "1GB", "--memory", "3GB", "--schedule", "gpipe,1f1b")
    assert {row["schedule"]: row["peak"] for row in answer["schedules"]} == {"1F1B": 2e9, "GPipe": 8e9}
    assert answer["memory_unit"] == "bytes"
    assert [row["fits"] for row in answer["schedules"]] == [True, False]


def test_w_may_need_less_than_a_microbatch_keeps() -> None:
    """The first row of "Zero bubble pipeline parallelism", whose W needs some 60 %, in the same memory."""
    times = ("--f", "18522us", "--i", "18086us", "--w", "9337us", "--comm", "601us")
    options = ("--ranks", "8", "--microbatches", "24", "--schedule", "ZB2p", *times)
    all_of_it, some = (
        as_json(*options, *more)["schedules"][0] for more in ((), ("--weight-activation", "60%"))
    )
    assert all_of_it["peak"] <= 16 >= some["peak"]
    assert round(some["span_bubble"], 4) == 0.0433 < all_of_it["span_bubble"]


def test_stages_may_have_times_of_their_own() -> None:
    times = ("--f", "1ms,1ms,3ms,1ms", "--i", "1ms", "--w", "0")
    answer = as_json("--ranks", "2", "--stages", "4", "--schedule", "GPipe", "--microbatches", "1", *times)
    assert answer["schedules"][0]["makespan_s"] == pytest.approx(10e-3)


def test_messages_take_their_time() -> None:
    options = ("--ranks", "2", "--microbatches", "1", "--schedule", "GPipe", "--f", "1ms")
    without, with_comm = (as_json(*options, "--comm", comm)["schedules"][0] for comm in ("0", "2ms"))
    assert with_comm["makespan_s"] == pytest.approx(without["makespan_s"] + 4e-3)


def test_what_can_not_serve_the_numbers_is_left_out_with_its_reason() -> None:
    answer = as_json("--ranks", "2", "--stages", "2", "--schedule", "1F1B,VHalf")
    assert [row["schedule"] for row in answer["schedules"]] == ["1F1B"]
    assert "a V needs two stages a rank, so give 4 stages" in answer["left_out"]["VHalf"]


def test_a_plan_is_simulated_under_its_own_schedule_or_others() -> None:
    Path("plan.json").write_text(example_plan().to_json())
    assert as_json("plan.json")["best"] == "1F1B"
    names = [row["schedule"] for row in as_json("plan.json", "--schedule", "all")["schedules"]]
    assert {"GPipe", "ZBH1"} <= {*names}
    assert as_json("plan.json", "--microbatches", "16")["schedules"][0]["microbatches"] == 16


def test_an_order_that_was_made_for_a_plan_is_one_of_its_schedules() -> None:
    """It said of the plan's own that there is no schedule 'ListSchedule', and left it out of all."""
    own = example_plan()
    made = replace(own, schedule="ListSchedule", order=replace(schedule_of(own), name="ListSchedule"))
    Path("plan.json").write_text(made.to_json())
    for options, names in (
        ((), {"ListSchedule"}),
        (("--schedule", "listschedule"), {"ListSchedule"}),
        (("--schedule", "GPipe, ListSchedule"), {"ListSchedule", "GPipe"}),
        (("--schedule", "GPipe"), {"GPipe"}),
    ):
        assert {row["schedule"] for row in as_json("plan.json", *options)["schedules"]} == names
    assert "ListSchedule" in {
        row["schedule"] for row in as_json("plan.json", "--schedule", "all")["schedules"]
    }
    with pytest.raises(
        ScheduleError, match=r"made for the plan's 4 microbatches, and --microbatches is 16: "
    ):
        run("plan.json", "--microbatches", "16")
    other = as_json("plan.json", "--schedule", "all", "--microbatches", "16")
    assert "made for the plan's 4 microbatches" in other["left_out"]["ListSchedule"]


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "DualPipeV"])
def test_a_csv_that_is_written_is_read_again(name: str) -> None:
    run("--ranks", "2", "--stages", "4", "--microbatches", "4", "--schedule", name, "--csv", "out/order.csv")
    text = Path("out/order.csv").read_text()
    assert Schedule.from_csv(text).rows == get_schedule(name)(4, 4, 2).rows
    straight = as_json("--ranks", "2", "--stages", "4", "--microbatches", "4", "--schedule", name)
    again = as_json("out/order.csv")
    assert again["best"] == "order"
    assert again["schedules"][0]["makespan_s"] == straight["schedules"][0]["makespan_s"]


def test_a_schedule_in_json_is_read_too() -> None:
    Path("order.json").write_text(get_schedule("ZBH1")(2, 4).to_json())
    assert as_json("order.json")["best"] == "ZBH1"


def test_a_chrome_trace_is_written() -> None:
    assert "wrote step.json" in run(
        "--ranks", "2", "--schedule", "1F1B", "--comm", "1ms", "--trace", "step.json"
    )
    names = {event["name"] for event in json.loads(Path("step.json").read_text())["traceEvents"]}
    assert {
        "stage 0 forward, microbatch 0",
        "stage 1 backward, microbatch 7",
        "stage 0 sends activations to stage 1, microbatch 0",
    } <= names


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ((), UsageError, "there is neither a file nor --ranks: give one, such as --ranks 8"),
        (("--ranks", "0"), UsageError, "--ranks is 0: give 1 or more"),
        (("--ranks", "2", "--microbatches", "-1"), UsageError, "--microbatches is -1: give 1 or more"),
        (
            ("--ranks", "4", "--microbatches", "99999999"),
            ScheduleError,
            "399999996 forward passes, more than",
        ),
        (("--ranks", "100000"), ScheduleError, "a step has 100000 stages, more than the 4096 that can be"),
        (("--ranks", "4", "--stages", "99"), UsageError, r"--stages is 99 on 4 ranks: .*such as 96 or 100"),
        (("--ranks", "4", "--schedule", "1F2B"), ScheduleError, "no schedule '1F2B': choose one of .*VMin"),
        (("--ranks", "4", "--schedule", ","), UsageError, "--schedule is ',': give all, or one or more of"),
        (("--ranks", "4", "--schedule", ""), UsageError, "--schedule is '': give all, or one or more of"),
        (("--ranks", "2", "--activation", "1GB", "--memory", "0"), UsageError, "--memory is '0': give what"),
        (("--ranks", "2", "--f", "1ms,"), UsageError, "--f is '1ms,': give a time such as 3ms"),
        (("--ranks", "2", "--f", "3 parsecs"), UsageError, "--f is '3 parsecs': there is no unit"),
        (("--ranks", "2", "--f", "1,2,3", "--stages", "2"), UsageError, "--f has 3 times for 2 stages"),
        (("--ranks", "2", "--memory", "80GB"), UsageError, "--activation is not given: give a number of"),
        (
            ("--ranks", "2", "--weight-activation", "1GB"),
            UsageError,
            "--weight-activation is '1GB': give a share from 0 to 1",
        ),
        (
            ("--ranks", "2", "--stages", "2", "--schedule", "VMin"),
            ScheduleError,
            "a V needs two stages a rank",
        ),
        (("nowhere.csv",), UsageError, r"nowhere.csv can't be read \(No such file"),
        (("--ranks", "2", "--csv", "."), UsageError, "--csv is ., a folder: give a file"),
        (("--ranks", "2", "--csv", "x", "--trace", "x"), UsageError, "--trace and --csv are both x"),
        (("--ranks", "2", "--csv", "f/x"), UsageError, "but .*/f is no folder"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    options: tuple[str, ...], error: type[PartitaError], message: str
) -> None:
    Path("f").write_text("")
    with pytest.raises(error, match=message) as raised:
        run(*options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1B0,1F0\n", r"rank 1, position 0 \(1B0\): it needs 1F0, which is at position 1; move it"),
        ("0F0\n1F0,1B0\n", "rank 0, stage 0, microbatch 0: there is no whole backward pass; add 0B0"),
        ("1F0,0F0,1B0,0B0\n", "the schedule stalls: rank 0 waits at position 0"),
        ("__import__('os')\n", "is not an action: write it like 2F0"),
        ("", "this CSV has no actions"),
    ],
)
def test_an_impossible_order_is_one_line(text: str, message: str) -> None:
    Path("order.csv").write_text(text)
    with pytest.raises(ScheduleError, match=message) as raised:
        run("order.csv")
    assert "\n" not in str(raised.value)


def test_a_plan_file_that_can_not_be_read_is_one_line() -> None:
    good = example_plan().to_json()
    for text, message in (
        (good.replace('"version": 1', '"version": 7'), "version 7 can't be read"),
        (good.replace('"version": 1', '"version": true'), "version True can't be read"),
        (good.replace('"version": 1', '"version": 1, "placement": []'), "field 'placement' is there twice"),
        (good.replace('"placement"', '"places"'), "Plan has the unknown field 'places'"),
        (good[:-2], "this is not JSON"),
        (good.replace("partita.plan", "partita.costs"), "the format is 'partita.costs'"),
    ):
        Path("plan.json").write_text(text)
        with pytest.raises(PlanError, match=message) as raised:
            run("plan.json")
        assert "\n" not in str(raised.value)
    Path("plan.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="is no text"):
        run("plan.json")
    Path("plan.json").write_text("[]")
    with pytest.raises(
        UsageError, match=r"plan.json holds a list in JSON, and no plan or schedule: give what"
    ):
        run("plan.json")


def test_options_that_a_file_answers_are_refused() -> None:
    Path("plan.json").write_text(example_plan().to_json())
    Path("order.csv").write_text("0F0,0B0\n")
    for options, message in (
        (("plan.json", "--f", "1ms"), r"^--f is given with plan.json, which has its own: leave it out"),
        (("plan.json", "--f", "1ms", "--comm", "1ms"), "^--f and --comm are given with .*: leave them out"),
        (("plan.json", "--stages", "2"), "which has its own: leave it out"),
        (("plan.json", "--ranks", "1"), "--ranks is 1, and the plan needs 2: give it as many"),
        (
            ("order.csv", "--schedule", "1F1B"),
            "--schedule is given with a schedule, which has its own: leave it out",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            run(*options)
    Path("two.csv").write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(PlanError, match="the schedule has 2 ranks, the cluster 1: give it as many"):
        run("two.csv", "--ranks", "1")


def test_help_has_examples() -> None:
    text = run("--help")
    assert "partita simulate --ranks 8 --microbatches 32 --memory 5" in " ".join(text.split())


def test_the_drawing_is_a_file_that_stands_alone() -> None:
    run("--ranks", "2", "--microbatches", "4", "--schedule", "1F1B", "--svg", "step.svg")
    drawn = ElementTree.fromstring(Path("step.svg").read_text(encoding="utf-8"))
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert ".heading" in next(drawn.iter("{http://www.w3.org/2000/svg}style")).text  # type: ignore[operator]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}rect"))) > 2 * 2 * 4
