"""`pipeline`, which cuts a model into a `Pipe`, and the measurements and reference graph for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.modules.held_norms import hold_norms
from partita._torch.operators.roofline import Speeds
from partita._torch.tensors.storage import has_memory
from partita.capture import Captured, Modes, capture
from partita.capture.merging.modes import captured_mode, copy_flags
from partita.capture.proving.proof import Proof, Prove
from partita.capture.refusal import check_call
from partita.errors import ArgumentError, NotProven
from partita.pipelining.frontends.cuts.annotations import split_points
from partita.pipelining.frontends.cuts.cuts import (
    SplitSpec,
    check_points,
    cuts_at_annotations,
    cuts_at_marks,
    cuts_at_points,
    stage_assignment,
)
from partita.pipelining.frontends.cuts.plan_request import PlanRequest
from partita.pipelining.frontends.cuts.plans import planned_cuts
from partita.pipelining.frontends.cuts.recompute_option import Recompute, recompute_option
from partita.pipelining.frontends.cuts.sources import check_marks, check_sources, module_cuts
from partita.pipelining.frontends.graph.coverage import (
    check_state,
    warn_of_changed_names,
    warn_of_extra_state,
)
from partita.pipelining.frontends.graph.cut_graph import cut_graph, key_random_calls
from partita.pipelining.frontends.graph.multi_use import (
    MultiUseParameterConfig,
    MultiUseParamSpec,
    check_multi_use,
)
from partita.pipelining.frontends.graph.other_mode import by_mode, check_shared_buffers, matched_assignment
from partita.pipelining.frontends.graph.pipe import GraphPipe
from partita.pipelining.frontends.graph.planned_sizes import check_sizes
from partita.pipelining.frontends.graph.recompute_regions import regions_of_modules, regions_of_units
from partita.pipelining.frontends.graph.returned_caches import warn_of_caches
from partita.pipelining.frontends.graph.units.chosen_units import units_to_plan
from partita.pipelining.frontends.graph.units.costs import REPEATS, cost_model
from partita.pipelining.frontends.graph.units.unit_runs import GraphLoss
from partita.pipelining.frontends.graph.writes import why_uncut
from partita.pipelining.frontends.modules.frontend import cut_modules
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.interface.compile_options import CompileArgument, CompileOptions, compile_options
from partita.pipelining.interface.loss import LossSpec
from partita.pipelining.interface.routes import TiedGradients
from partita.pipelining.interface.two_modes import ModeCut, TwoModes
from partita.pipelining.measuring.link_times import links_between
from partita.pipelining.stages.hooked_parameters import check_joint_hooks
from partita.pipelining.stages.original_model import OriginalModel
from partita.planning import Cluster, CostModel, Plan, get_device
from partita.planning.hardware._sizes import read_bytes
from partita.planning.searching.stages import count_of_units, too_many_stages

__all__ = ["keyed_graph", "measure_units", "pipeline"]

SplitPolicy = Callable[[GraphModule], GraphModule]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: SplitSpec | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    stages: int | None = None,
    plan: Plan | Literal["auto"] | None = None,
    cluster: Cluster | None = None,
    schedule: str | None = None,
    microbatches: int = 8,
    memory_limit: int | str | None = None,
    tied_gradients: TiedGradients = "exact",
    loss_spec: LossSpec | None = None,
    multi_use_param_spec: MultiUseParamSpec = MultiUseParameterConfig.REPLICATE,
    dynamic_shapes: Any = None,
    modes: Modes = "both",
    frontend: Literal["export", "modules"] = "export",
    prove: Prove = True,
    recompute: Recompute | None = None,
    compile: CompileArgument = None,  # noqa: A002 - as the method is called
) -> Pipe:
    """Cut a model into pipeline stages. The model is not changed and can be cut again.

    The cuts come from exactly one of: ``split_spec``; `annotate_split_points`; `pipe_split` marks in the
    model's ``forward``, or put into the captured graph by ``split_policy``; ``stages`` (that many stages,
    planned for the smallest bottleneck from costs measured now); ``plan`` (made before with `measure_units`
    and `plan_stages`). A cut with no operation on one side of it does not count.

    Args:
        module: the model. Captured in training and in evaluation mode; the pipe follows ``train()`` and
            ``eval()``.
        mb_args: example arguments, with the shapes of one microbatch.
        mb_kwargs: example keyword arguments.
        split_spec: from qualified module name to `SplitPoint`. Where a module is called several times,
            ``"block@1"`` or ``("block", 1)`` is its second call.
        split_policy: takes the captured graph module and returns it with `pipe_split` marks in it.
        stages: how many stages to plan for, from costs measured now; for a model on the meta device, from
            the operations and bytes of its operators. Where ``torch.distributed`` is initialised this is
            collective over the default group: rank 0's plan is used by all.
        plan: the plan to cut by; or ``"auto"``: search for the stages, placement, schedule and recomputation
            that are the fastest on the ranks of ``torch.distributed`` (or of ``cluster``), from costs that
            all of them measure now, at the same time (of compiled units, with ``compile``), and from what
            messages between them take. Collective, too. See `Pipe.schedule`.
        cluster: the links and memory that are planned for.
        schedule: the schedule that is planned for; without it 1F1B, and with ``plan="auto"`` any.
        microbatches: the number of microbatches that is planned for.
        memory_limit: what a rank may hold, in bytes or as text (``"80GB"``).
        tied_gradients: what the schedule that is planned for does with gradients of parameters that several
            stages hold, as `PipelineSchedule` takes it; `Pipe.schedule` follows.
        loss_spec: a tree like the model's output with True at the loss, where the model returns it: then a
            call of the pipe runs the backward pass too, and schedules need no ``loss_fn``. Without it a call
            of the pipe does what the model does, and schedules without a ``loss_fn`` take what the model's
            output, if it is a dict, holds under ``"loss"``.
        multi_use_param_spec: what happens to parameters that several stages use, for all or by name.
        dynamic_shapes: which sizes stay open, as ``torch.export`` has it, over the arguments of the model.
            None: the batch size, if the model allows it (otherwise ``info()`` says why not); False: none.
        modes: ``"train"`` or ``"eval"`` to capture one mode only. Of a model that takes another path in each
            mode both are captured, and its stages run that of their mode; the cuts of the second follow those
            of the first.
        frontend: ``"export"`` captures the model; ``"modules"`` runs the model's own code on every stage and
            cuts between calls of its submodules: for models that can't be captured, because they read values
            of tensors, draw random numbers in Python or change lists of their own.
        prove: whether to run the captured graph and the model itself on the example and on other samples of
            its kind (other values and masks, another batch size where it is open), and compare outputs,
            gradients, buffers and random numbers. True compares bit for bit; ``"close"`` or a ``Tolerance``
            accepts a difference; False compares nothing. ``Pipe.proof`` says what was compared. Where that is
            not possible (on the meta device, or for lack of memory), a `NotProven` warning says so.
        recompute: activation checkpointing, with the same results bit for bit. True: every stage keeps only
            what enters it, and runs again at the start of its backward pass. A list: these stages, by index,
            and submodules by name (``*`` stands for any one part of it: ``"blocks.*.mlp"``), each of which
            is recomputed alone when its backward pass comes. None: what the plan says.
        compile: compile the stages, when they first run: True for Inductor, a backend, or a dict of the
            arguments of ``Stage.compile``.

    Raises:
        ArgumentError: no source of the cuts was given, or more than one.
        CaptureError: the model can't be captured, the captured graph computes something else than the model,
            or the cut goes through memory that the model writes to.
        InfeasiblePlan: there are more stages than the model can be cut into, or no plan fits the memory.
        PlanError: a plan for other units, or for more ranks than there are.

    Warns:
        CostlyCut: keys and values of attention would travel only to be returned (``use_cache``).
        NotProven: nothing could be compared with the model; or its evaluation differs under ``no_grad``.

    >>> import torch
    >>> from partita.pipelining import SplitPoint
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"1": SplitPoint.END})
    >>> pipe.num_stages, list(pipe.get_stage_module(1).state_dict())
    (2, ['2.weight', '2.bias'])
    """
    check_call(module, mb_args)
    sources = {"split_spec": split_spec, "split_policy": split_policy, "stages": stages, "plan": plan}
    named = [name for name, value in sources.items() if value is not None]
    annotations = split_points(module)
    check_sources(named, list(annotations))
    check_points(module, split_spec or {})
    recompute_option(recompute, None)  # what it is
    limit = None if memory_limit is None else read_bytes(memory_limit, "memory_limit")
    compiled_with = compile_options(compile)
    compiled = compiled_with is not None
    request = PlanRequest(
        stages,
        plan,
        cluster,
        schedule,
        microbatches,
        limit,
        compiled=compiled,
        tied_gradients=tied_gradients,
    )
    if frontend == "modules":
        others = {
            "multi_use_param_spec": multi_use_param_spec is not MultiUseParameterConfig.REPLICATE,
            "dynamic_shapes": dynamic_shapes is not None,
            "split_policy": split_policy is not None,
        }
        where = module_cuts(module, split_spec, request, [name for name, used in others.items() if used])
        blocks = cut_modules(module, mb_args, mb_kwargs or {}, where, loss_spec, modes, prove, recompute)
        check_joint_hooks([blocks.get_stage_module(index) for index in range(blocks.num_stages)])
        blocks.compile_options = compiled_with
        if prove is not False:
            _warn_of(module, blocks.proof)
        blocks.original = OriginalModel(module, blocks.unkept)
        return blocks
    if frontend != "export":
        raise ArgumentError(f"frontend is {frontend!r}: choose 'export' or 'modules'")
    check_multi_use(module, multi_use_param_spec)
    # Capture the model, in both modes where it takes another path in each.
    captured, evaluation = by_mode(
        capture(module, mb_args, mb_kwargs, dynamic_shapes=dynamic_shapes, modes=modes, prove=prove)
    )
    if prove is not False:
        _warn_of(module, captured.proof)
    # Find the cuts in the first graph.
    whole = captured.module if split_policy is None else split_policy(captured.module)
    cuts, ends, chosen = cuts_at_marks(whole), list[int](), None
    check_marks(named, cuts, list(annotations))
    if annotations:
        cuts = cuts_at_annotations(whole, module, annotations)
    elif split_spec is not None:
        cuts = cuts_at_points(whole, split_spec)
    elif stages is not None or plan is not None:
        flat = captured.signature.flatten(mb_args, mb_kwargs or {})
        chosen, cuts, ends = _planned(whole, evaluation, flat, request, compiled_with)
    again = recompute_option(recompute, chosen)
    regions = [*regions_of_modules(whole, again.modules), *regions_of_units(whole, ends, again.units)]
    assignment = stage_assignment(whole, cuts)
    # The cuts of the second graph follow from those of the first, before that one is changed.
    other = None
    if evaluation is not None:
        other = _cut_like(evaluation, whole, assignment, multi_use_param_spec)
    pipe = GraphPipe(
        whole,
        cut_graph(whole, assignment, multi_use_param_spec),
        captured.signature,
        chosen,
        loss_spec,
        other,
        proof=captured.proof,
        regions=regions,
    )
    pipe.recompute |= again.whole_stages(pipe.num_stages)
    if other is not None or captured_mode(whole) is not None:
        _follow_flags(module, pipe)
    stage_modules = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    hold_norms(module, stage_modules)
    check_state(module, stage_modules)
    warn_of_extra_state(module)
    warn_of_changed_names(module)
    check_joint_hooks(stage_modules)
    warn_of_caches(module, pipe, captured.signature.flatten(mb_args, mb_kwargs or {}))
    if compiled_with is not None:
        pipe.compile_with(compiled_with)
    pipe.original = OriginalModel(module, pipe.unkept)
    pipe.cut_with(mb_args, mb_kwargs)
    return pipe


def _warn_of(model: nn.Module, proof: Proof) -> None:
    """Warn, on behalf of `pipeline`, of what a proof leaves open."""
    but = proof.without_gradients if proof.holds else proof
    if but:
        warnings.warn(f"{type(model).__name__} is cut, but {but}", NotProven, stacklevel=3)


def _planned(
    whole: GraphModule,
    evaluation: Captured | None,
    flat: Sequence[Any],
    request: PlanRequest,
    compiled_with: CompileOptions | None,
) -> tuple[Plan, list[int], list[int]]:
    """The plan, made here where there is none yet, its cuts, and where its units end."""
    # Without a schedule to search for, only the stages' shares count: compiling every unit is not worth it.
    runs = request.plan == "auto" and all(map(has_memory, whole.parameters()))
    measured_with = compiled_with if runs else None
    ready = request.ready
    ends, names = units_to_plan(whole, evaluation, None if ready else request.least_units, ready)
    request.check_units(len(names), lambda: why_uncut(whole))
    tensors = [*whole.parameters(), *flat]
    plan = ready or request.planned(
        lambda: cost_model(whole, ends, flat, compile_options=measured_with), links_between(tensors)
    )
    cuts = planned_cuts(plan, names, ends)
    check_sizes(plan, whole, ends)
    return plan, cuts, ends


def _cut_like(
    evaluation: Captured, whole: GraphModule, assignment: Mapping[str, int], spec: MultiUseParamSpec
) -> ModeCut:
    """Cut the graph of evaluation where ``whole``, that of training, is cut."""
    graph = evaluation.module
    cuts_at_marks(graph)
    matched = matched_assignment(whole, assignment, graph)
    check_shared_buffers(whole, assignment, graph, matched)
    return ModeCut(graph, cut_graph(graph, matched, spec), evaluation.signature)


def _follow_flags(model: nn.Module, pipe: GraphPipe) -> None:
    """Give a pipe, and each of its modules, the training flags of the model."""
    pipe.train(model.training)
    for index in range(pipe.num_stages):
        copy_flags(model, pipe.get_stage_module(index))
    copy_flags(model, pipe.whole)


def measure_units(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    repeats: int = REPEATS,
    device: Speeds | str | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    progress: Callable[[float], None] | None = None,
    dynamic_shapes: Any = None,
    prove: Prove = False,
    compile: CompileArgument = None,  # noqa: A002 - as the method is called
) -> CostModel:
    """Return the costs of a model's units, for `plan_stages`: measured on this machine, or worked out for a
    ``device`` from the operators and bytes of the model, which may be on the meta device.

    Each unit is run alone, as a stage would run it: forward (F), backward (B), and backward in two halves,
    for the gradients of inputs (I) and of weights (W). Units that are equal are run once. Every pass counts
    with the median of the repeats. Where several ranks will compute at the same time on one machine, let them
    measure at the same time too: they share its memory's bandwidth.

    Args:
        stages: how many stages are wanted: where there are fewer than four large units for each, smaller
            ones are taken.
        repeats: how many runs count, after one that does not.
        device: what to work the seconds out for: the name of a device, such as ``"H100"``, or one with speeds
            of your own (`partita.planning.Device`). Without it, a model on the meta device gets the seconds
            of no particular device, good for ratios only.
        loss_fn: the loss that the schedule will compute, called with what the model returns and ``target``:
            it is a part of the last unit. Without it the loss costs nothing.
        target: of one microbatch.
        progress: called with the share of the work that is done, from 0.0 to 1.0.
        dynamic_shapes: as for `pipeline`; for a model on the meta device none stay open where it is None,
            since it takes several times as long to trace with open sizes.
        prove: as for `pipeline`, which proves the model that it cuts in any case.
        compile: as for `pipeline`: the seconds are those of compiled F, B, I and W. Bytes are those of
            uncompiled passes. A unit that can't be compiled counts as it is, with a warning.

    Raises:
        ArgumentError: ``compile`` with a ``device`` or a model on the meta device, where nothing runs.
        InfeasiblePlan: more stages than there are of the smallest units, before any is measured.
        PlanError: the name of a device that is unknown.
    """
    speeds = get_device(device) if isinstance(device, str) else device
    on_meta = not all(map(has_memory, module.parameters()))
    compiled_with = compile_options(compile)
    if compiled_with is not None and (device is not None or on_meta):
        what = "the model is on the meta device" if device is None else f"device is {device!r:.60}"
        raise ArgumentError(
            f"measure_units got compile, and {what}: seconds of compiled units are measured, not worked out. "
            "Leave out compile, or give a model with weights and no device"
        )
    if dynamic_shapes is None and on_meta:
        dynamic_shapes = False
    captured, evaluation = by_mode(
        capture(module, mb_args, mb_kwargs, dynamic_shapes=dynamic_shapes, prove=prove)
    )
    loss = None if loss_fn is None else GraphLoss(loss_fn, target, captured.signature.unflatten)
    ends, names = units_to_plan(captured.module, evaluation, stages, None)
    if stages is not None and stages > len(names):
        raise too_many_stages(stages, len(names), count_of_units(len(names), why_uncut(captured.module)))
    return cost_model(
        captured.module,
        ends,
        captured.signature.flatten(mb_args, mb_kwargs or {}),
        repeats=repeats,
        speeds=speeds,
        loss=loss,
        progress=progress,
        compile_options=compiled_with,
    )


def keyed_graph(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    prove: Prove = True,
) -> GraphModule | TwoModes:
    """Return the uncut model as a graph whose random numbers follow the pipeline's rule (see
    ``partita.runtime.rng``). It holds the model's own parameters.

    Run with `UncutReference` it computes what a pipeline of any number of stages computes.
    """
    captured = capture(module, mb_args, mb_kwargs, dynamic_shapes=dynamic_shapes, prove=prove)
    first, evaluation = by_mode(captured)
    graphs = [first.module] if evaluation is None else [first.module, evaluation.module]
    for graph in graphs:
        cuts_at_marks(graph)
        key_random_calls(graph)
    if evaluation is None:
        return first.module
    whole = TwoModes(graphs[0], graphs[1], {True: first.signature, False: evaluation.signature})
    copy_flags(module, whole)
    return whole
