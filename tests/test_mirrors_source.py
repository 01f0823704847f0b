"""Whoever changes a module finds its tests: in the file of the same name in the mirrored folder, or in the
file that the table below names.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "partita"
LINES = 40
"""Smaller modules are tested with the modules that use them."""
MOST_IMPORTS = 4
"""From a test to the module that it covers, unless it mentions a public name of the module."""
IMPORT = re.compile(r"^ *from ((?:partita|tests)[\w.]*) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
PUBLIC = re.compile(r"^(?:def|class) ([A-Za-z]\w*)", re.MULTILINE)
COVERED_BY = {
    "_torch/distributed/gradient_sync.py": "pipelining/stages/test_data_parallel.py",
    "_torch/export/alike.py": "_torch/export/test_same_calls.py",
    "_torch/graph_module/block_mask.py": "pipelining/against_torch/test_torchs_names.py",
    "_torch/graph_module/graph_pickle.py": "_torch/graph_module/test_nodes.py",
    "_torch/graph_module/guards_module.py": "_torch/graph_module/test_nodes.py",
    "_torch/graph_module/quick_code.py": "_torch/graph_module/test_nodes.py",
    "_torch/operators/output_mask.py": "pipelining/compiled/test_backward_cut.py",
    "capture/merging/merge_branches.py": "capture/merging/test_branches.py",
    "capture/proving/comparison.py": "capture/proving/test_proof.py",
    "capture/proving/differing_node.py": "capture/proving/test_proof.py",
    "cli/demo.py": "cli/test_main.py",
    "cli/models/hugging_face_config.py": "cli/models/test_hugging_face.py",
    "cudagraphs/facts/devices.py": "cudagraphs/regions/test_capturable.py",
    "cudagraphs/facts/fixed_addresses.py": "cudagraphs/recording/test_pool.py",
    "cudagraphs/facts/written_inputs.py": "cudagraphs/test_torch_is_wrong.py",
    "cudagraphs/options.py": "cudagraphs/test_backend.py",
    "cudagraphs/padding/row_call.py": "cudagraphs/padding/test_padding.py",
    "cudagraphs/padding/row_layout.py": "cudagraphs/padding/test_padding.py",
    "cudagraphs/padding/row_proof.py": "cudagraphs/padding/test_padding.py",
    "cudagraphs/padding/row_rules.py": "cudagraphs/padding/test_padding.py",
    "cudagraphs/recording/recorder.py": "cudagraphs/recording/test_cpu.py",
    "cudagraphs/regions/launch_savings.py": "cudagraphs/regions/test_grouping.py",
    "cudagraphs/replaying/call_signature.py": "cudagraphs/replaying/test_module.py",
    "cudagraphs/replaying/entry.py": "cudagraphs/replaying/test_module.py",
    "cudagraphs/replaying/outputs.py": "cudagraphs/replaying/test_module.py",
    "ddp/buckets/bucket_set.py": "ddp/reducing/test_arrivals.py",
    "ddp/buckets/comm_hooks.py": "ddp/test_gradients.py",
    "ddp/buckets/settings.py": "ddp/reducing/test_tuning.py",
    "ddp/forward_cut/buckets.py": "ddp/forward_cut/test_optimizer.py",
    "ddp/replicas/broadcast.py": "ddp/replicas/test_replicate.py",
    "ddp/replicas/owners.py": "ddp/replicas/test_replicate.py",
    "ddp/replicas/replicated.py": "ddp/replicas/test_replicate.py",
    "ddp/replicas/replication.py": "ddp/replicas/test_replicate.py",
    "demo/model.py": "demo/test_run.py",
    "demo/settings.py": "demo/test_run.py",
    "demo/summary.py": "demo/test_run.py",
    "demo/training.py": "demo/test_run.py",
    "graph/effect_rules/function_tables.py": "graph/test_truth.py",
    "graph/effect_rules/functions.py": "graph/test_truth.py",
    "graph/effect_rules/node_effect.py": "graph/test_effects.py",
    "graph/effect_rules/operators.py": "graph/test_truth.py",
    "graph/storages.py": "graph/test_effects.py",
    "integrations/generation/program.py": "integrations/generation/test_pipeline_generator.py",
    "integrations/refused_arguments.py": "integrations/test_transformers.py",
    "pipelining/_backward.py": "pipelining/against_torch/test_torchs_names.py",
    "pipelining/_utils.py": "pipelining/against_torch/test_torchs_names.py",
    "pipelining/blocks/current_pass.py": "pipelining/blocks/test_stage_pass.py",
    "pipelining/blocks/cut.py": "pipelining/frontends/modules/test_frontend.py",
    "pipelining/blocks/memos.py": "pipelining/blocks/test_attributes.py",
    "pipelining/blocks/packet.py": "pipelining/blocks/test_transfer.py",
    "pipelining/blocks/replaying/model_frames.py": "pipelining/blocks/test_stage_pass.py",
    "pipelining/blocks/replaying/numbered_tensors.py": "pipelining/blocks/test_stage_pass.py",
    "pipelining/blocks/replaying/replay.py": "pipelining/blocks/test_stage_pass.py",
    "pipelining/checkpoints/contents/checkpoint_source.py": "pipelining/checkpoints/test_checkpoint.py",
    "pipelining/checkpoints/files/aliased_writer.py": "pipelining/checkpoints/together/test_savers.py",
    "pipelining/checkpoints/files/manifest_writer.py": "pipelining/checkpoints/together/test_savers.py",
    "pipelining/checkpoints/pretrained/safetensors_files.py": "pipelining/checkpoints/test_weight_files.py",
    "pipelining/compiled/artifacts.py": "pipelining/compiled/test_compiled_forward.py",
    "pipelining/compiled/crossing.py": "pipelining/compiled/test_backward_cut.py",
    "pipelining/decoding/turn.py": "pipelining/decoding/test_run_programs.py",
    "pipelining/frontends/cuts/recompute_option.py": "pipelining/test_recompute.py",
    "pipelining/frontends/cuts/sources.py": "pipelining/test_from_plan_to_run.py",
    "pipelining/frontends/graph/recompute_regions.py": "pipelining/test_recompute.py",
    "pipelining/frontends/modules/build.py": "pipelining/frontends/modules/test_frontend.py",
    "pipelining/frontends/modules/pipe.py": "pipelining/frontends/modules/test_frontend.py",
    "pipelining/frontends/pipe.py": "pipelining/frontends/test_pipeline.py",
    "pipelining/interface/pipe_info.py": "pipelining/stages/test_build.py",
    "pipelining/interface/values.py": "pipelining/interface/test_routes.py",
    "pipelining/measuring/unit_run.py": "pipelining/measuring/test_pass_memory.py",
    "pipelining/microbatch.py": "pipelining/against_torch/test_torchs_names.py",
    "pipelining/recompute/checkpointed_pass.py": "pipelining/test_recompute.py",
    "pipelining/recompute/checkpointing.py": "pipelining/test_recompute.py",
    "pipelining/recompute/module_state.py": "pipelining/test_recompute.py",
    "pipelining/recompute/region.py": "pipelining/test_recompute.py",
    "pipelining/recompute/runs_twice.py": "pipelining/test_recompute.py",
    "pipelining/schedules.py": "pipelining/against_torch/test_torchs_names.py",
    "pipelining/stages/backward/autograd_cut.py": "pipelining/stages/backward/test_split_backward.py",
    "pipelining/stages/backward/tied_share.py": "pipelining/stages/test_stage.py",
    "pipelining/stages/graph_stage.py": "pipelining/stages/test_build.py",
    "pipelining/stages/own_modules/crossing.py": "pipelining/stages/own_modules/test_manual.py",
    "pipelining/stages/own_modules/declared_outputs.py": "pipelining/stages/own_modules/test_manual.py",
    "pipelining/stages/placing/state_of_stage.py": "pipelining/stages/placing/test_materialise.py",
    "pipelining/stages/value_stage.py": "pipelining/stages/own_modules/test_manual.py",
    "pipelining/steps/planned_schedule.py": "pipelining/test_from_plan_to_run.py",
    "pipelining/steps/preparing/preparation.py": "pipelining/steps/preparing/test_arguments.py",
    "pipelining/steps/preparing/shape_exchange.py": "pipelining/steps/preparing/test_arguments.py",
    "pipelining/steps/running/actions.py": "pipelining/steps/test_schedules.py",
    "pipelining/steps/running/executor.py": "pipelining/steps/test_schedules.py",
    "pipelining/steps/running/instructions.py": "pipelining/steps/test_schedules.py",
    "pipelining/steps/running/mailbox.py": "pipelining/steps/test_schedules.py",
    "pipelining/tied/share_gradients.py": "pipelining/tied/test_tied.py",
    "pipelining/tied/tied_sum.py": "pipelining/tied/test_tied.py",
    "pipelining/training/eager_model.py": "pipelining/training/test_verify_step.py",
    "planning/_check.py": "planning/hardware/test_cluster.py",
    "planning/_json.py": "planning/costs/test_cost_model.py",
    "planning/costs/units.py": "planning/costs/test_cost_model.py",
    "planning/cutting/_cuts.py": "planning/searching/test_stages.py",
    "planning/cutting/_rank_memory.py": "planning/searching/test_stages.py",
    "planning/cutting/cut_problem.py": "planning/searching/test_stages.py",
    "planning/cutting/make_stage.py": "planning/searching/cuts/test_cut_reasons.py",
    "planning/generators/gpipe.py": "planning/generators/test_generators.py",
    "planning/generators/interleaved_1f1b.py": "planning/generators/test_generators.py",
    "planning/generators/interleaved_zero_bubble.py": "planning/generators/test_generators.py",
    "planning/generators/making/arguments.py": "planning/generators/test_generators.py",
    "planning/generators/making/list_scheduler.py": "planning/generators/test_generators.py",
    "planning/generators/making/problem.py": "planning/searching/orders/test_clock.py",
    "planning/generators/making/ticks.py": "planning/generators/test_generators.py",
    "planning/generators/making/v_block.py": "planning/generators/test_generators.py",
    "planning/generators/one_f_one_b.py": "planning/generators/test_generators.py",
    "planning/generators/v_shaped/dualpipe_v.py": "planning/generators/test_generators.py",
    "planning/generators/v_shaped/v_half.py": "planning/generators/test_generators.py",
    "planning/generators/v_shaped/v_min.py": "planning/generators/test_generators.py",
    "planning/generators/v_shaped/zbv_zero_bubble.py": "planning/generators/test_generators.py",
    "planning/generators/zb_h1.py": "planning/generators/test_generators.py",
    "planning/schedules/_program.py": "planning/simulating/test_simulate.py",
    "planning/searching/bounds.py": "planning/searching/test_shortage.py",
    "planning/searching/cuts/cut_choices.py": "planning/searching/test_search.py",
    "planning/searching/cuts/memory_cuts.py": "planning/searching/test_search.py",
    "planning/searching/explore.py": "planning/searching/test_search.py",
    "planning/searching/explorer.py": "planning/searching/test_search.py",
    "planning/searching/orders/improve.py": "planning/searching/orders/test_list_schedule.py",
    "planning/searching/result.py": "planning/searching/test_search.py",
    "planning/simulating/_step_program.py": "planning/simulating/test_clock.py",
    "reporting/capture/capture_tables.py": "reporting/capture/test_capture_report.py",
    "reporting/comparison/comparison_table.py": "reporting/comparison/test_comparison_html.py",
    "runtime/chunk_specs.py": "runtime/test_microbatches.py",
    "runtime/comms/_baton.py": "runtime/comms/test_in_process.py",
    "runtime/comms/_operation.py": "runtime/comms/test_process_group.py",
    "runtime/comms/_starter.py": "runtime/test_comm_contract.py",
    "runtime/comms/comm.py": "runtime/test_comm_contract.py",
    "runtime/comms/operation_errors.py": "runtime/comms/test_process_group.py",
    "runtime/comms/own_groups.py": "runtime/comms/test_process_group.py",
    "runtime/failures/thread_activity.py": "runtime/failures/test_stalls.py",
    "runtime/graph_compiler.py": "ddp/replicas/test_replicate.py",
    "runtime/host_generators.py": "pipelining/blocks/test_stage_pass.py",
    "splitter/building/cut.py": "splitter/test_captures.py",
    "splitter/building/stitch.py": "splitter/test_captures.py",
    "splitter/decisions/analysis.py": "splitter/test_bugs.py",
    "splitter/decisions/assignment.py": "splitter/test_bad_input.py",
    "splitter/decisions/caching.py": "splitter/test_bugs.py",
    "splitter/decisions/flow.py": "splitter/test_captures.py",
    "splitter/decisions/ordering.py": "splitter/test_bugs.py",
    "splitter/result.py": "splitter/test_bugs.py",
    "splitter/split.py": "splitter/test_bad_input.py",
    "verification/comparing/judge.py": "verification/test_verify_exceptions.py",
    "verification/comparing/state_comparison.py": "verification/test_verify_buffers.py",
    "verification/observing/observe.py": "verification/test_verify_exceptions.py",
    "verification/observing/snapshot.py": "verification/test_verify_randomness.py",
    "verification/observing/subject.py": "verification/observing/test_copying.py",
}
"""Modules without a test file of their name, and the test that runs most of each."""


MODULES = [
    str(path.relative_to(SOURCE))
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) > LINES
]


def _mirror(module: str) -> Path:
    path = TESTS / module
    return path.with_name(f"test_{path.name.removeprefix('_')}")


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _imported(path: Path) -> frozenset[Path]:
    """The files that a file imports from; a name that a package exports counts as that of its own file."""
    files = {
        _file_of(module, name)
        for module, several, one in IMPORT.findall(_text(path))
        for name in re.findall(r"(\w+)(?: as \w+)?", several or one)
    }
    if re.search("^import partita$", _text(path), re.MULTILINE):
        files |= _imported(SOURCE / "__init__.py")
    return frozenset(file for file in files if file is not None)


@cache
def _file_of(module: str, name: str) -> Path | None:
    folder = (SOURCE.parent if module.startswith("partita") else TESTS.parent).joinpath(*module.split("."))
    for file in (folder / f"{name}.py", folder.with_suffix(".py")):
        if file.exists():
            return file
    face = folder / "__init__.py"
    for origin, several, one in IMPORT.findall(_text(face)) if face.exists() else ():
        if re.search(rf"\b{name}\b", several or one):
            return _file_of(origin, name)
    return None


def _is_near(test: Path, module: Path) -> bool:
    seen, ring = {test}, {test}
    for _ in range(MOST_IMPORTS):
        ring = {file for path in ring for file in _imported(path)} - seen
        seen |= ring
    return module in seen


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_test(module: str) -> None:
    assert _mirror(module).exists() or module in COVERED_BY, (
        f"add {_mirror(module).relative_to(TESTS.parent)}, or say in COVERED_BY which test covers {module}"
    )


@pytest.mark.parametrize(("module", "test"), COVERED_BY.items(), ids=COVERED_BY)
def test_no_line_of_the_table_is_stale(module: str, test: str) -> None:
    path = SOURCE / module
    assert module in MODULES, f"{module} is gone, or too small to need a line"
    assert not _mirror(module).exists(), f"{module} has a test file of its name"
    names, words = PUBLIC.findall(_text(path)), set(re.findall(r"\w+", _text(TESTS / test)))
    covers = not words.isdisjoint(names) or _is_near(TESTS / test, path)
    assert covers, f"tests/{test} has nothing to do with {module}"


def test_the_table_is_sorted() -> None:
    assert list(COVERED_BY) == sorted(COVERED_BY)
