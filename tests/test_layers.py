"""Imports go down the layers only, and only ``_torch`` touches what torch does not document."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "partita"
# Each may import what stands on an earlier line. Those on one line never import each other.
LAYERS = (
    ("_version", "errors", "garbage", "listing"),
    ("_torch",),
    ("graph",),
    ("splitter",),
    ("verification",),
    ("capture",),
    ("planning",),
    ("runtime",),
    ("ddp", "pipelining", "cudagraphs", "fsdp"),
    ("reporting",),
    ("demo", "integrations"),
    ("cli",),
    ("__main__",),
)
COMMANDS = tuple(
    sorted(path.stem for path in (SOURCE / "cli").glob("*.py") if path.stem not in ("__init__", "main"))
)
# Likewise the rooms within a package; a file beside them counts as a room.
ROOMS = {
    "_torch": (
        ("tensors", "containers", "modules", "autograd"),
        ("operators", "graph_module"),
        ("export", "compile", "distributed"),
        ("fake",),
        ("fake_module",),
    ),
    "cudagraphs": (
        ("facts",),
        ("regions", "recording", "padding"),
        ("replaying", "explain", "options"),
        ("backend",),
        ("runner",),
    ),
    "ddp": (("buckets",), ("reducing",), ("replicas",), ("compiled", "forward_cut")),
    "graph": (
        ("ancestors", "effect_rules", "attributes", "levels"),
        ("storages", "regions"),
        ("effects",),
        ("casts", "conversions", "copies", "liveness", "order", "structure"),
    ),
    "splitter": (("result",), ("decisions",), ("building",), ("split",), ("drop_in",)),
    "verification": (("tree", "result"), ("observing",), ("comparing",), ("explaining",), ("verify",)),
    "capture": (
        ("one_thread_at_a_time",),
        ("tracing",),
        ("open_sizes",),
        ("merging",),
        ("proving",),
        ("refusal",),
        ("attempts",),
        ("export",),
    ),
    "planning": (
        ("_check", "_json"),
        ("hardware", "schedules"),
        ("costs",),
        ("plan",),
        ("simulating",),
        ("generators", "cutting"),
        ("searching",),
    ),
    "runtime": (
        ("failures",),
        ("comms",),
        ("chunk_specs", "sample_lists"),
        ("example_arguments",),
        (
            "rng",
            "freed_memory",
            "microbatches",
            "one_at_a_time",
            "piece_runner",
            "publish_errors",
            "same_settings",
            "trace",
            "weight_sample",
        ),
        ("host_generators", "graph_compiler"),
    ),
    "reporting": (("drawing",), ("replication", "split", "capture"), ("step",), ("plan",), ("comparison",)),
    "cli": (
        ("models", "output"),
        ("options",),
        ("verifying", "pages"),
        COMMANDS,
        ("main",),
    ),
    "pipelining": (
        ("interface",),
        ("frontends.cuts",),
        ("recompute",),
        ("compiled",),
        ("stages",),
        ("blocks", "tied", "measuring"),
        ("steps", "decoding"),
        ("training",),
        ("frontends.pipe",),
        ("frontends.graph",),
        ("frontends.modules", "checkpoints"),
        ("frontends",),
    ),
    "pipelining.stages": (
        ("backward", "data_parallel", "parts", "hooked_parameters", "flight", "step_count"),
        ("original_model", "other_ranks", "other_weights"),
        ("compile_module", "copying"),
        ("stage",),
        ("placing", "value_stage", "optimizer_steps"),
        ("graph_stage", "own_modules"),
        ("build", "interop"),
    ),
    "pipelining.steps": (
        ("loss_weights", "running"),
        ("preparing",),
        ("schedules",),
        ("schedule_bases",),
        ("schedule_kinds",),
        ("planned_schedule",),
    ),
    "pipelining.blocks": (
        ("current_pass", "cut", "memos", "tensor_attributes", "transfer"),
        ("replaying",),
        ("packet", "staying_state"),
        ("stage_pass",),
        ("stage_module",),
        ("decoding_pass", "stage"),
    ),
    "planning.generators": (
        ("making",),
        ("forward_only", "gpipe", "looped_bfs", "one_f_one_b", "v_shaped", "zb_h1"),
        ("interleaved_1f1b", "zb_h2"),
        ("interleaved_zero_bubble",),
        ("zb_2p",),
        ("registry",),
        ("plan_schedule",),
    ),
    "planning.searching": (
        ("layouts", "orders"),
        ("optimal", "trial"),
        ("bounds", "cuts", "result"),
        ("explorer",),
        ("explore", "stages"),
        ("remedies",),
        ("shortage",),
        ("search",),
    ),
    "pipelining.checkpoints": (
        ("files", "together"),
        ("contents",),
        ("pretrained.safetensors_files",),
        ("checkpoint", "latest", "snapshots", "state_report", "weight_files"),
        ("pretrained",),
    ),
}
# These show what is below under torch's names, as `__init__` does under the package's.
FACES = ("_IR", "__init__", "_backward", "_utils", "microbatch", "schedules", "stage")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(SOURCE.rglob("*.py"))
PRIVATE = (
    "torch._",
    "torch.utils._",
    "torch.fx._",
    "torch.nn._",
    "torch.autograd._",
    "torch.cuda._",
    "torch.distributed._",
    "torch.distributed.distributed_c10d",
    "torch.export._",
)


def layer_of(path: Path) -> str:
    """The folder of the package that a file lies in, or its own name at the top."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, read and parsed once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> tuple[tuple[str, int], ...]:
    """Every absolute module name that a file imports, with its line."""
    return tuple(_imported(tree_of(path)))


def _imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("layer", LEVEL)
def test_imports_go_down_the_layers(layer: str) -> None:
    for path in filter(lambda path: layer_of(path) == layer, FILES):
        for name, line in imported(path):
            parts = name.split(".")
            if parts[0] != "partita" or len(parts) < 2 or parts[1] == layer:
                continue
            assert parts[1] in LEVEL, f"{path}:{line} imports {name}, which has no layer"
            assert LEVEL[parts[1]] < LEVEL[layer], (
                f"{path}:{line}: {layer} imports {parts[1]}, which is not below it"
            )


def room_of(package: str, module: str) -> str:
    """The folder within a package that a module lies in, or its own name beside the folders."""
    parts = module.removeprefix(f"partita.{package}.").split(".")
    longest = max(
        (name for levels in ROOMS[package] for name in levels), key=lambda name: _shared(name, parts)
    )
    return longest if _shared(longest, parts) else parts[0]


def _shared(room: str, parts: list[str]) -> int:
    names = room.split(".")
    return len(names) if parts[: len(names)] == names else 0


@pytest.mark.parametrize("package", ROOMS)
def test_arrows_between_rooms_go_one_way(package: str) -> None:
    level = {name: number for number, names in enumerate(ROOMS[package]) for name in names}
    folder = SOURCE.joinpath(*package.split("."))
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if path.name == "__init__.py" or (inside.stem in FACES and inside.parent == Path()):
            continue
        own = room_of(package, ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts))
        assert own in level, f"{path} lies in no room that has a place in the order"
        for name, line in imported(path):
            if not name.startswith(f"partita.{package}."):
                continue
            other = room_of(package, name)
            assert other == own or level[other] < level[own], (
                f"{path}:{line}: {own} imports {other}, which is not below it"
            )


def test_no_circle_of_files() -> None:
    names = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    arrows = {
        name: {other for other, _ in imported(path) if other in names and other != name}
        for name, path in names.items()
        if path.name != "__init__.py"
    }
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_every_folder_has_a_layer() -> None:
    folders = {layer_of(path) for path in FILES} - {"__init__"}  # which loads its names on first use
    assert folders == LEVEL.keys()


def test_only_one_folder_imports_private_torch() -> None:
    for path in filter(lambda path: layer_of(path) != "_torch", FILES):
        private = [(name, line) for name, line in imported(path) if name.startswith(PRIVATE)]
        assert not private, f"{path} imports {private}: put it behind a function in partita/_torch"


def test_the_planner_imports_nothing_but_itself_and_the_standard_library() -> None:
    for path in sorted((SOURCE / "planning").rglob("*.py")):
        for name, line in imported(path):
            assert not name.startswith(("torch", "numpy", "rich", "typer", "jinja2")), (
                f"{path}:{line} imports {name}"
            )


def test_imports_stand_at_the_top() -> None:
    """But in `_torch`, and in commands, which import what needs torch when they run: help is quicker; and but
    for networkx, which takes a third of a second, and is for who cuts a compiled backward pass.
    """
    commands = SOURCE / "cli"
    for path in FILES:
        if layer_of(path) == "_torch" or path.parent == commands:
            continue
        lines = {line for name, line in imported(path) if name != "networkx"}
        for function in ast.walk(tree_of(path)):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = lines.intersection(range(function.lineno, (function.end_lineno or 0) + 1))
                assert not inside, f"{path}:{inside} imports inside {function.name}"
