"""``partita plan``, as it is called; mostly from saved costs, which need no model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.reporting.step.test_html import Page
from typer.testing import CliRunner

from partita.cli.main import app
from partita.errors import InfeasiblePlan, PartitaError, PlanError, ScheduleError, UsageError
from partita.planning import Cluster, CostModel, Plan, TiedUnits, Unit
from partita.planning.costs.spanning import SpanningValue
from partita.reporting.drawing.units import format_seconds

EVIL = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    units = tuple(
        Unit(f"{n}:{EVIL}", 0.001, 0.002, 10**6, 500_000, 2 * 10**6, (f"layers.{n}",)) for n in range(12)
    )
    Path("costs.json").write_text(CostModel(units, (10**5,) * 11).to_json())


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run("costs.json", *arguments, "--json"))
    return answer


def test_the_best_plan_comes_first_and_is_written() -> None:
    answer = as_json("--devices", "4xH100", "--microbatches", "4", "--out", "out/plan.json")
    makespans = [row["makespan_s"] for row in answer["candidates"]]
    assert makespans == sorted(makespans)
    assert answer["makespan_s"] == makespans[0]
    plan = Plan.from_json(Path("out/plan.json").read_text())
    assert json.loads(plan.to_json()) == answer["plan"]
    assert plan.ranks == 4
    assert plan.cluster is not None
    assert plan.cluster.memory(0) == 80 * 10**9


def test_gradients_of_tied_weights_are_told_and_can_be_planned_as_one_sum_a_step() -> None:
    """Command-A on 32 devices: 9.26 s a step with its embedding's gradients in each microbatch, and 3.56 s
    with one sum a step, for which there was no way to plan.
    """
    saved = CostModel.from_json(Path("costs.json").read_text())
    units = tuple(replace(unit, parameter_bytes=10**9) for unit in saved.units)
    Path("costs.json").write_text(
        replace(saved, units=units, tied=(TiedUnits((0, 11), 10**9, gradient_bytes=10**9),)).to_json()
    )
    devices = ("--devices", "4xH100", "--schedule", "1F1B", "--stages", "4")
    exact, reduced = as_json(*devices), as_json(*devices, "--tied-gradients", "reduced")
    sum_s = Cluster.of_devices("4xH100").all_reduce_s(10**9, (0, 3))
    assert reduced["makespan_s"] - sum_s <= exact["makespan_s"]
    assert sum(reduced["peak_bytes"]) < sum(exact["peak_bytes"])
    assert reduced["assumed"]["tied gradients"] == "reduced"
    assert "the gradients of tied weights (954 MiB) go from stage to stage" in run("costs.json", *devices)
    text = run("costs.json", *devices, "--tied-gradients", "reduced")
    assert "one sum of their gradients after each step (tied_gradients='reduced')" in text
    assert f"the step ends {format_seconds(sum_s)} after its last pass, with the gradients' sum" in text
    assert (exact["plan"]["tied_gradients"], reduced["plan"]["tied_gradients"]) == ("exact", "reduced")
    assert "go from stage to stage" not in text


def test_a_large_value_that_all_stages_use_is_named() -> None:
    """T5 at 4096 tokens sends a table of 4 GiB to each stage; no word said so."""
    saved = CostModel.from_json(Path("costs.json").read_text())
    table = SpanningValue(2**32, 2**32, 0, tuple(range(1, 12)), 0)
    small, local = SpanningValue(10, 0, 0, (4, 11)), SpanningValue(2**32, 0, 10, (11,))
    costs = replace(saved, crossing_bytes=(2**32,) * 11, spanning=(small, table, local))
    Path("costs.json").write_text(costs.to_json())
    text = run("costs.json", "--devices", "3xH100", "--stages", "3", "--schedule", "1F1B")
    (line,) = (line for line in text.splitlines() if "one value" in line)
    assert line == (
        "4.00 GiB of what is sent is one value, made by layers.0 in stage 0 and used in 2 others (1 to 2): "
        "it is sent to each of them for every microbatch"
    )


def test_a_written_plan_is_simulated_as_it_was_planned() -> None:
    answer = as_json("--ranks", "2", "--microbatches", "4", "--out", "plan.json")
    result = CliRunner().invoke(app, ["simulate", "plan.json", "--json"])
    (row,) = json.loads(result.stdout)["schedules"]
    assert row["makespan_s"] == pytest.approx(answer["makespan_s"])
    slip = CliRunner().invoke(app, ["simulate", "plan.json", "--memory", "3"])
    assert "that is 3 bytes, and the parameters of stage" in str(slip.exception)
    assert "did you mean 3GB?" in str(slip.exception)


def test_tables_and_a_drawing_are_shown() -> None:
    text = run("costs.json", "--ranks", "2", "--microbatches", "4", "--schedule", "1F1B,gpipe")
    assert "modules in layers" in text
    assert " 9-11 " in text
    assert "1F1B" in text
    assert "rank 1" in text
    assert "peak memory by rank: " in text
    assert text.startswith(
        "memory: 4 times the parameters, for them, their gradients and the optimizer's state"
    )
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("columns", ["80", "120", None])
def test_where_the_cuts_are_is_readable_at_any_width(
    columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns, and where the output was no terminal, each stage's modules were cut to ``model…``."""
    monkeypatch.delenv("COLUMNS")
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    options = ("--ranks", "3", "--microbatches", "4", "--schedule", "1F1B", "--stages", "3")
    text = run("costs.json", *options)
    assert "modules in layers" in text
    for stage in as_json(*options)["plan"]["stages"]:
        first, last = (stage["modules"][end].removeprefix("layers.") for end in (0, -1))
        assert f" {first}-{last} " in text
    assert ("no room for" in text) == (columns == "80")


def test_stages_schedule_and_memory_are_kept_to() -> None:
    options = ("--ranks", "2", "--stages", "4", "--schedule", "Interleaved1F1B", "--microbatches", "4")
    answer = as_json(*options, "--memory", "60MB")
    assert {(row["schedule"], row["stages"]) for row in answer["candidates"]} == {("Interleaved1F1B", 4)}
    assert max(answer["peak_bytes"]) <= 60 * 10**6


def test_the_page_shows_users_names_literally_and_what_would_be_gained() -> None:
    run("costs.json", "--ranks", "2", "--microbatches", "4", "--schedule", "1F1B", "--html", "plan.html")
    source = Path("plan.html").read_text(encoding="utf-8")
    assert EVIL not in source
    page = Page(source)
    headings = [attributes.get("id") for tag, attributes in page.tags if tag == "h2"]
    assert headings == ["stages", "cuts", "timeline", "memory", "gains", "candidates", "environment"]
    assert "one more rank" in page.words
    assert "without recomputation" in page.words


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ((), UsageError, "there is neither --devices nor --ranks: give --devices, such"),
        (("--devices", "2xH100", "--ranks", "2"), UsageError, "--ranks is 2, and --devices say it too"),
        (("--ranks", "2", "--nodes", "2"), UsageError, "--nodes and --device-file go with --devices"),
        (("--ranks", "0"), UsageError, "--ranks is 0: give 1 or more"),
        (
            ("--devices", "16xH1000"),
            UsageError,
            r"no device 'H1000': use A100, B200, CPU, .*as --device-file$",
        ),
        (("--devices", "lots"), UsageError, "there is no device 'lots'"),
        (("--devices", "-1xH200"), PlanError, "devices are '-1xH200': write them like 16xH100"),
        (("--devices", "200000xH200"), PlanError, "'200000xH200', that is 200000: give at most 100000"),
        (("--devices", "2xH100", "--memory", "0GB"), UsageError, "--memory is '0GB': give what a rank"),
        (("--devices", "16xH100", "--nodes", "3"), PlanError, "there are 16 devices for 3 nodes"),
        (("--devices", "4xH100", "--stages", "99"), UsageError, r"--stages is 99 for 4 ranks: .* 96 or 100"),
        (
            ("--devices", "4xH100", "--stages", "many"),
            UsageError,
            "--stages is 'many': give auto or a number",
        ),
        (("--devices", "4xH100", "--stages", "0"), UsageError, "--stages is 0 for 4 ranks"),
        (("--devices", "4xH100", "--schedule", "1F2B"), ScheduleError, "no schedule '1F2B': choose one of"),
        (("--devices", "4xH100", "--microbatches", "0"), UsageError, "--microbatches is 0: give 1 or more"),
        (("--devices", "4xH100", "--memory", "lots"), UsageError, "--memory is 'lots': write it like 80GB"),
        (("--devices", "4xH100", "--parameter-copies", "-1"), UsageError, "--parameter-copies is -1.0"),
        (("--devices", "4xH100", "--tied-gradients", "no"), UsageError, "'no': give exact or reduced"),
        (("--devices", "4xH100", "--out", "."), UsageError, r"--out is \., a folder: give a file"),
        (("--devices", "4xH100", "--device-file", "x.toml"), PlanError, r"'x\.toml' can't be read"),
    ],
)
@pytest.mark.parametrize("model", ["costs.json", "nowhere.py:build"])
def test_bad_options_are_refused_before_a_model_is_made(
    model: str, options: tuple[str, ...], error: type[PartitaError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        run(model, *options)
    assert "\n" not in str(raised.value)


def test_what_is_no_saved_cost_model_is_one_line() -> None:
    Path("plan.json").write_text(Path("costs.json").read_text().replace("partita.costs", "partita.plan"))
    with pytest.raises(PlanError, match=r"the format is 'partita.plan', expected 'partita.costs'"):
        run("plan.json", "--ranks", "2")
    with pytest.raises(UsageError, match=r"nowhere.json can't be read"):
        run("nowhere.json", "--ranks", "2")


def advice(*arguments: str) -> str:
    with pytest.raises(InfeasiblePlan) as raised:
        run("costs.json", *arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_nothing_that_fits_says_what_is_short() -> None:
    advice("--ranks", "2", "--memory", "1MB", "--microbatches", "2")


@pytest.mark.parametrize(
    "options",
    [
        ("--devices", "4xH100", "--nodes", "2", "--schedule", "1F1B", "--memory", "13MB"),
        ("--devices", "2xH100", "--schedule", "1F1B", "--stages", "4", "--memory", "25MB"),
        ("--ranks", "2", "--schedule", "GPipe", "--no-recompute", "--memory", "36MB"),
        ("--devices", "H100,A100", "--schedule", "1F1B", "--memory", "20MB"),
        ("--ranks", "2", "--memory", "20MB", "--parameter-copies", "6"),
    ],
)
def test_what_to_type_can_be_typed_and_gives_a_plan(options: tuple[str, ...]) -> None:
    """17 ranks were named for two nodes, and a plan under schedules that were not asked for."""
    message = advice(*options, "--microbatches", "8")
    changes = message.partition("; ")[2].removesuffix(" it would fit").split(" or ")
    assert changes
    for change in changes:
        again = [*options, "--microbatches", "8"]
        if change == "without --no-recompute":
            again.remove("--no-recompute")
        else:
            again += re.findall(r"--[a-z-]+|(?<= )[^\s()-][^\s()]*", change[change.index("--") :])
        run("costs.json", *again)


def test_python_names_are_not_named_at_the_command_line() -> None:
    base = ("--ranks", "2", "--schedule", "GPipe", "--microbatches", "8")
    assert "without --no-recompute it would fit" in advice(*base, "--no-recompute", "--memory", "36MB")
    assert re.search(r"; with --memory [\d.]+MB or with --\w", advice(*base, "--memory", "20MB"))
    large = advice("--devices", "2xH100", "--memory", "20MB", "--stages", "2")
    assert re.search(r"with --devices \d+xH100 --stages \d+ it would fit$", large)
    many = advice("--ranks", "4", "--stages", "16", "--microbatches", "4")
    assert many.endswith("but this model can be cut into at most 12; with --stages 12 it would fit")


def test_memory_without_its_unit_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"--memory is '80', that is 80 bytes, .*: did you mean 80GB\?"):
        run("costs.json", "--devices", "2xH100", "--memory", "80")


def test_one_rank_and_one_microbatch_are_a_plan() -> None:
    answer = as_json("--ranks", "1", "--microbatches", "1")
    assert answer["makespan_s"] == pytest.approx(0.036)


def test_a_model_of_a_file_is_measured_here_and_its_costs_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("model.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n"
        "    print('inside')\n"
        "    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))\n"
        "    return model, (torch.ones(2, 4),)\n"
    )
    options = ("--ranks", "2", "--schedule", "1F1B", "--stages", "2", "--microbatches", "2")
    answer = json.loads(run("model.py:build", *options, "--json", "--save-costs", "saved.json"))
    cut = len(answer["plan"]["stages"][0]["modules"])
    assert [stage["modules"] for stage in answer["plan"]["stages"]] == [[*"0123"][:cut], [*"0123"][cut:]]
    assumed = {"microbatch": "argument 0 float32[2, 4]", "dtype": "float32", "parameter copies": "4"}
    assert answer["assumed"] == assumed
    again = json.loads(run("saved.json", *options, "--json"))
    assert again["plan"] == answer["plan"]


def test_a_hugging_face_model_is_planned_for_devices_without_weights() -> None:
    pytest.importorskip("transformers")
    settings = "num_hidden_layers=2 hidden_size=32 intermediate_size=64 num_attention_heads=2 vocab_size=128"
    model = ["hf:llama", "--sequence", "16", "--batch", "1"]
    model += [part for setting in settings.split() for part in ("--set", setting)]
    text = run(*model, "--devices", "2xA100", "--schedule", "1F1B", "--microbatches", "4", "--json")
    plan = json.loads(text)["plan"]
    modules = [name for stage in plan["stages"] for name in stage["modules"]]
    assert {"model.embed_tokens", "model.layers.1.mlp.up_proj", "lm_head"} <= {*modules}
    assert all(0 < stage["forward_s"] < 1e-3 for stage in plan["stages"])


def test_help_has_examples_and_completion_knows_names() -> None:
    assert "partita plan hf:llama --set num_hidden_layers=80" in " ".join(run("--help").split())


@pytest.mark.parametrize(
    ("option", "value"), [("--set", "num_layers=2"), ("--model-type", "llama"), ("--batch", "4")]
)
def test_options_of_a_model_are_refused_beside_saved_costs(option: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is given with costs.json, costs that were saved"):
        run("costs.json", "--devices", "4xH100", option, value)
