"""``partita convert``, as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import PartitaError, PlanError, ScheduleError, UsageError
from partita.planning import CostModel, Schedule, Unit, get_schedule, lower, plan_stages, schedule_names


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["convert", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_runs_from_the_shell_and_an_impossible_order_is_one_line() -> None:
    command = [sys.executable, "-m", "partita", "convert"]
    Path("bad.csv").write_text("0B0,0F0\n,1F0,1B0\n")
    result = subprocess.run(
        [*command, "bad.csv", "out.csv"], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 2
    assert result.stderr.startswith("ScheduleError: rank 0, position 0 (0B0)")
    assert len(result.stderr.splitlines()) == 1
    assert not Path("out.csv").exists()
    result = subprocess.run(
        [*command, "1F1B", "out.csv", "--ranks", "2", "--microbatches", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "wrote out.csv: 1F1B, 2 stages on 2 ranks, 2 microbatches\n"


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_goes_to_csv_to_json_and_back(name: str) -> None:
    kind = get_schedule(name)
    stages = 4 if kind.shape == "V" else 2
    run(name.lower(), "a.csv", "--ranks", "2", "--stages", str(stages), "--microbatches", "4")
    assert Schedule.from_csv(Path("a.csv").read_text()).rows == kind(stages, 4, 2).rows
    run("a.csv", "b.json")
    run("b.json", "c.csv")
    assert Path("a.csv").read_text() == Path("c.csv").read_text()
    assert Schedule.from_json(Path("b.json").read_text()).name == "a"


def test_torch_reads_every_cell() -> None:
    printed = json.loads(run("DualPipeV", "order.csv", "--ranks", "2", "--messages", "--json"))
    assert printed.pop("wrote") == "order.csv"
    assert printed == {"schedule": "DualPipeV", "stages": 4, "ranks": 2, "microbatches": 8, "messages": True}
    cells = [cell for line in Path("order.csv").read_text().splitlines() for cell in line.split(",") if cell]
    assert len(cells) > 50
    for cell in cells:
        assert str(torch_schedules._Action.from_str(cell)) == cell


def test_a_plan_gives_its_order() -> None:
    units = tuple(Unit(f"block{n}", 0.001, 0.002, 10, 5, activation_bytes=100) for n in range(8))
    plan = plan_stages(CostModel(units, (8,) * 7), 2, schedule="GPipe", microbatches=3)
    Path("plan.json").write_text(plan.to_json())
    assert run("plan.json", "x/order.json").startswith("wrote x/order.json: GPipe, 2 stages on 2 ranks, 3 ")
    assert Schedule.from_json(Path("x/order.json").read_text()) == get_schedule("GPipe")(2, 3)


def test_messages_are_written_out_and_left_out() -> None:
    run("1F1B", "order.csv", "--ranks", "2", "--microbatches", "2")
    run("order.csv", "lowered.csv", "--messages")
    expected = lower(get_schedule("1F1B")(2, 2))
    assert Schedule.from_csv(Path("lowered.csv").read_text()).rows == expected.rows
    run("lowered.csv", "same.csv")
    assert Path("same.csv").read_text() == Path("lowered.csv").read_text()
    run("lowered.csv", "again.csv", "--messages")
    assert Path("again.csv").read_text() == Path("lowered.csv").read_text()
    run("lowered.csv", "compute.json", "--no-messages")
    assert not Schedule.from_json(Path("compute.json").read_text()).is_lowered


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("1F1B", "out.csv"), UsageError, "1F1B is the name of a schedule, and --ranks is not given"),
        (("1F2B", "out.csv", "--ranks", "2"), ScheduleError, "no schedule '1F2B': .*VMin.*; or give a file"),
        (("1F1B", "out.txt", "--ranks", "2"), UsageError, r"OUT is out.txt: its name has to end in .csv or"),
        (("1F1B", ".", "--ranks", "2"), UsageError, "OUT is ., a folder: give a file"),
        (("1F1B", "out.csv", "--ranks", "0"), UsageError, "--ranks is 0: give 1 or more"),
        (("nowhere.csv", "out.csv"), UsageError, r"nowhere.csv can't be read \(No such file"),
        (("good.csv", "out.csv", "--microbatches", "3"), UsageError, "--microbatches is given with good.csv"),
        (("stall.csv", "out.csv"), ScheduleError, "rank 0"),
        (("twice.csv", "out.csv"), ScheduleError, "stage 0 is on rank 0 and on rank 1"),
        (("words.csv", "out.csv"), ScheduleError, "rank 0, position 1"),
        (("other.json", "out.csv"), PlanError, "the format is None"),
        (("VMin", "out.csv", "--ranks", "2", "--stages", "2"), ScheduleError, "give 4 stages"),
    ],
)
def test_what_can_not_be_used_is_refused_before_anything_is_written(
    arguments: tuple[str, ...], error: type[PartitaError], message: str
) -> None:
    Path("good.csv").write_text("0F0,,,0B0\n,1F0,1B0\n")
    Path("stall.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    Path("twice.csv").write_text("0F0,0B0\n0F1,0B1\n")
    Path("words.csv").write_text("0F0,hello\n")
    Path("other.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(error, match=message) as raised:
        run(*arguments)
    assert len(str(raised.value).splitlines()) == 1
    assert not Path("out.csv").exists()
