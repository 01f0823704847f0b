"""A model cut in so many stages, and everything that is compared with the model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tools.models.stillness import draws, still
from torch import Tensor, nn

import partita
from partita.errors import PartitaError
from partita.pipelining import Pipe, UncutReference, get_schedule_class, pipeline
from partita.planning import get_schedule
from partita.runtime import (
    Comm,
    InProcessWorld,
    RandomKey,
    Replicate,
    TensorChunkSpec,
    enter_site,
    keyed,
    merge,
)
from partita.runtime.host_generators import keyed_generators
from partita.verification.tree import tensors

__all__ = ["FRONTENDS", "MICROBATCHES", "SAMPLES", "Cuts", "EagerCuts"]

MICROBATCHES = 4
SAMPLES = 2
"""In a microbatch."""
COMPILED = ("ZBVZeroBubble", "Interleaved1F1B")
"""Under which compiled stages run: I and W apart, and B as a whole."""
FRONTENDS: tuple[Literal["export", "modules"], ...] = ("export", "modules")
"""In the order in which they are tried."""


class Cuts:
    """A model cut in so many stages, once; the pipe follows ``train()`` and ``eval()``.

    Where the model can't be cut in one mode, it is tried again in the other.

    Attributes:
        frontend: the one of `FRONTENDS` that cut the model: the first that can; none until it is cut.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Any], stages: int) -> None:
        self.model = model
        self.inputs = inputs
        self.stages = stages
        self.frontend = ""
        self._pipe: Pipe | None = None
        self._refused: dict[bool, PartitaError] = {}

    def in_mode(self, training: bool) -> Pipe:
        """Return the pipe in that mode, in which the model is then too."""
        self.model.train(training)
        if training in self._refused:
            raise self._refused[training]
        if self._pipe is None:
            try:
                self._pipe = self._cut()
            except PartitaError as error:
                self._refused[training] = error
                raise
        return self._pipe.train(training)

    def _cut(self) -> Pipe:
        first: PartitaError | None = None
        for frontend in FRONTENDS:
            try:
                pipe = pipeline(
                    self.model,
                    (),
                    self.inputs,
                    stages=self.stages,
                    microbatches=MICROBATCHES,
                    frontend=frontend,
                )
            except PartitaError as error:
                first = first or error
                continue
            if pipe.num_stages != self.stages:
                raise AssertionError(f"{pipe.num_stages} stages, not {self.stages}")
            self.frontend = frontend
            return pipe
        assert first is not None
        raise first

    def compare_calls(self, *, training: bool, inputs: Mapping[str, Any] | None = None) -> None:
        """Compare a call of the pipe with one of the model: outputs, gradients, buffers, random state.

        Args:
            inputs: those that it was cut with, where not given.
        """
        kwargs = dict(self.inputs if inputs is None else inputs)
        pipe = self.in_mode(training)
        compared = partita.verify(pipe, self.model, (), kwargs, explain=False)
        if any(difference.kind == "exception" for difference in compared.differences):
            copy.deepcopy(pipe)(**kwargs)  # what it raises says more
        compared.check()
        if compared.raised is not None:
            raise AssertionError(f"the model itself raises: {compared.raised}")

    def compare_steps(self, batch: dict[str, Any]) -> None:
        """Compare a 1F1B step of ranks with the uncut graph over the same microbatches."""
        _compare_with_graph(self.in_mode(True), batch)

    def compare_compiled_steps(self, batch: dict[str, Any]) -> None:
        """Compare steps of compiled stages, on two ranks, with the uncut graph, and where they differ, with
        the uncut graph compiled as a whole.

        Raises:
            AssertionError: both differ, or a stage runs uncompiled.
        """
        pipe = self.in_mode(True)
        if self.frontend != "export":
            raise AssertionError("there is no graph to compile")
        for schedule in COMPILED:
            try:
                _compare_with_graph(pipe, batch, schedule, "aot_eager")
            except AssertionError as error:
                try:
                    _compare_with_graph(pipe, batch, schedule, "aot_eager", compiled=True)
                except Exception:
                    raise AssertionError(f"{schedule}: {error}") from error


class EagerCuts(Cuts):
    """Like `Cuts`, but a step is compared with the model itself, run over the microbatches in order.

    The random numbers of a step are those of its microbatches and places, not the model's: so a model that
    draws some is compared without dropout, and where that does not help, in evaluation mode, and where that
    does not help either, with the random numbers that the first stage has.
    """

    def runs_with(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the model takes these in training."""
        try:
            copy.deepcopy(self.model).train()(**inputs)
        except RuntimeError:
            return False
        return True

    def compare_eager_steps(self, microbatches: Sequence[dict[str, Any]], shared: Sequence[str]) -> None:
        """Compare a 1F1B step of ranks with the model over these microbatches.

        Args:
            microbatches: what each is given; all have as many samples.
            shared: arguments that are the same in each.
        """
        self.model.train()
        model, training, cuts = self.model, True, self
        if draws(model, microbatches[0]):
            model = still(self.model)
            training = not draws(model, microbatches[0])
            cuts = EagerCuts(model, self.inputs, self.stages)
        pipe = cuts.in_mode(training)
        whole = copy.deepcopy(model).train(training)
        outputs, losses = _eager_step(whole, microbatches)
        specs = {name: Replicate() if name in shared else TensorChunkSpec(0) for name in microbatches[0]}
        specs = {name: spec for name, spec in specs.items() if isinstance(microbatches[0][name], Tensor)}
        _same_step(pipe, whole, merge(outputs), losses, _joined(microbatches, shared), specs)


def _eager_step(model: nn.Module, microbatches: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Tensor]]:
    outputs, losses = [], []
    for number, microbatch in enumerate(microbatches):
        with keyed(RandomKey(seed=0, step=0, microbatch=number)), keyed_generators():
            enter_site(0)
            output = model(**microbatch)
        loss_value = loss(output, None)
        if not loss_value.isfinite():
            raise AssertionError(f"the model's loss is {loss_value.item()}")
        torch.autograd.backward(loss_value, torch.full_like(loss_value, 1 / len(microbatches)))
        losses.append(loss_value.detach())
        outputs.append(output)
    return outputs, losses


def _joined(microbatches: Sequence[dict[str, Any]], shared: Sequence[str]) -> dict[str, Any]:
    first = microbatches[0]
    return {
        name: torch.cat([microbatch[name] for microbatch in microbatches])
        if isinstance(value, Tensor) and name not in shared
        else value
        for name, value in first.items()
    }


def _compare_with_graph(
    pipe: Pipe,
    batch: dict[str, Any],
    schedule: str = "1F1B",
    backend: str | None = None,
    *,
    compiled: bool = False,
) -> None:
    """Compare a step of ranks with the uncut graph, as it is or compiled as a whole."""
    whole = copy.deepcopy(pipe.whole)
    if compiled:
        whole.compile(backend="aot_eager")
    losses: list[Tensor] = []
    outputs = UncutReference(whole, MICROBATCHES, loss).step(target=_nothing(), losses=losses, **batch)
    _same_step(pipe, whole, outputs, losses, batch, {}, schedule, backend)


def _same_step(
    pipe: Pipe,
    whole: nn.Module,
    outputs: Any,
    losses: list[Tensor],
    batch: dict[str, Any],
    specs: dict[str, Any],
    schedule: str = "1F1B",
    backend: str | None = None,
) -> None:
    """Compare a step of ranks with ``outputs``, ``losses``, gradients and state of ``whole``.

    Args:
        schedule: one stage a rank under 1F1B, and else two.
        backend: stages are compiled with it.
    """
    state, gradients = _state(whole), _gradients(whole)
    ranks = pipe.num_stages if schedule == "1F1B" else pipe.num_stages // 2
    placement = get_schedule(schedule)(pipe.num_stages, MICROBATCHES, ranks).stage_ranks

    def body(comm: Comm) -> tuple[Any, list[Tensor], dict[int, nn.Module]]:
        own = copy.deepcopy(pipe)
        stages = {
            index: own.build_stage(index, comm=comm)
            for index, rank in enumerate(placement)
            if rank == comm.rank
        }
        for stage in stages.values():
            if backend is not None:
                stage.compile(backend)
        stage_losses: list[Tensor] = []
        kind, every = get_schedule_class(schedule), list(stages.values())
        argument: Any = every[0] if schedule == "1F1B" else every
        runner = kind(argument, MICROBATCHES, loss, kwargs_chunk_spec=specs or None)
        output = runner.step(target=_nothing(), losses=stage_losses, **batch)
        return output, stage_losses, {index: stage.module for index, stage in stages.items()}

    results = InProcessWorld(ranks).run(body)
    last = placement[-1]
    _same(results[last][0], outputs, "output")
    _same(results[last][1], losses, "loss")
    modules = {index: module for _, _, on_rank in results for index, module in on_rank.items()}
    for module in modules.values():
        stage_state, grads = _state(module), _gradients(module)
        _same(stage_state, {name: state[name] for name in stage_state}, "state")
        _same(grads, {name: gradients[name] for name in grads}, "gradient")
        refused = getattr(vars(module).get("forward"), "refused", "")
        if refused:
            raise AssertionError(f"a stage runs uncompiled: {refused}")
    missing = set(state).difference(*map(_state, modules.values()))
    if missing:
        raise AssertionError(f"no stage holds {', '.join(sorted(missing)[:3])}")


def loss(output: Any, _target: Any) -> Tensor:
    """Return a loss that depends on every floating-point tensor of the output, also on infinite logits."""
    values = [value for _, value in tensors(output, "") if value.is_floating_point()]
    return torch.stack([value.float().clamp(-1e3, 1e3).square().mean() for value in values]).sum()


def _nothing() -> Tensor:
    return torch.zeros(SAMPLES * MICROBATCHES)


def _state(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: value.detach().clone() for name, value in named}


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: value.grad for name, value in module.named_parameters(remove_duplicate=False)}


def _same(actual: Any, expected: Any, what: str) -> None:
    """Compare two structures of tensors.

    Raises:
        AssertionError: they are not equal bit for bit, or not built alike; names the first difference.
    """
    mine, theirs = list(tensors(actual, what)), list(tensors(expected, what))
    if type(actual) is not type(expected) or [path for path, _ in mine] != [path for path, _ in theirs]:
        raise AssertionError(
            f"{what}: the pipeline's is a {type(actual).__name__} of {len(mine)} tensors, not a "
            f"{type(expected).__name__} of {len(theirs)}"
        )
    for (path, left), (_, right) in zip(mine, theirs, strict=True):
        if left.dtype != right.dtype or left.shape != right.shape:
            raise AssertionError(
                f"{path}: {left.dtype}{list(left.shape)}, not {right.dtype}{list(right.shape)}"
            )
        if not torch.equal(left.nan_to_num(), right.nan_to_num()):
            share = (left != right).float().mean().item()
            raise AssertionError(
                f"{path}: {share:.1%} of the elements differ by up to {(left - right).abs().max():.1e}"
            )
