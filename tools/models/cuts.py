"""A model cut in so many stages, and everything that is compared with the model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    Args:
        inputs: the example.
        for_training: whether only the graph of training is cut, and not compared with the model first.

    Attributes:
        frontend: the one of `FRONTENDS` that cut the model: the first that can; none until it is cut.
        refused: what the first one said where it could not.
    """

    def __init__(
        self, model: nn.Module, inputs: dict[str, Any], stages: int, *, for_training: bool = False
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.stages = stages
        self.for_training = for_training
        self.frontend = ""
        self._pipe: Pipe | None = None
        self.refused: PartitaError | None = None
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
                    modes="train" if self.for_training else "both",
                    prove=not self.for_training,
                )
            except PartitaError as error:
                first = first or error
                continue
            if pipe.num_stages != self.stages:
                raise AssertionError(f"{pipe.num_stages} stages, not {self.stages}")
            self.frontend, self.refused = frontend, first
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
        pipe = self.in_mode(True)
        _step_of_ranks(pipe, batch, {}).compare(_uncut_step(pipe, batch))

    def compare_compiled_steps(self, batch: dict[str, Any]) -> Literal["equal", "as compiled"]:
        """Compare steps of compiled stages, on two ranks, with the uncut graph ("equal"), and where they
        differ, with the uncut model in one compiled stage ("as compiled").

        Raises:
            AssertionError: both differ, or a stage runs uncompiled.
        """
        pipe = self.in_mode(True)
        if self.frontend != "export":
            raise AssertionError(f"there is no graph to compile: {self.refused}")
        uncut, compiled = _uncut_step(pipe, batch), None
        for schedule in COMPILED:
            done = _step_of_ranks(pipe, batch, {}, schedule, "aot_eager")
            done.check_compiled()
            try:
                done.compare(uncut)
            except AssertionError as error:
                compiled = compiled or self._compiled_uncut(batch)
                try:
                    done.compare(compiled)
                except AssertionError as other:
                    raise AssertionError(f"{schedule}: {error}; uncut compiled: {other}") from error
        return "equal" if compiled is None else "as compiled"

    def _compiled_uncut(self, batch: dict[str, Any]) -> _Step:
        whole = Cuts(self.model, self.inputs, 1, for_training=True).in_mode(True)
        done = _step_of_ranks(whole, batch, {}, backend="aot_eager")
        done.check_compiled()
        return done


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
        done = _step_of_ranks(pipe, _joined(microbatches, shared), specs)
        done.compare(_Step(merge(outputs), losses, [whole]))


@dataclass(frozen=True)
class _Step:
    """What a step leaves.

    Attributes:
        output: merged.
        losses: of the microbatches.
        modules: of all stages; the whole model, where it is uncut.
    """

    output: Any
    losses: list[Tensor]
    modules: list[nn.Module]

    def compare(self, uncut: _Step) -> None:
        """Compare a step of stages with an uncut one, bit for bit."""
        [whole] = uncut.modules
        state, gradients = _state(whole), _gradients(whole)
        _same(self.output, uncut.output, "output")
        _same(self.losses, uncut.losses, "loss")
        for module in self.modules:
            stage_state, grads = _state(module), _gradients(module)
            _same(stage_state, {name: state[name] for name in stage_state}, "state")
            _same(grads, {name: gradients[name] for name in grads}, "gradient")
        missing = set(state).difference(*map(_state, self.modules))
        if missing:
            raise AssertionError(f"no stage holds {', '.join(sorted(missing)[:3])}")

    def check_compiled(self) -> None:
        """Raise AssertionError where a stage runs uncompiled."""
        for module in self.modules:
            refused = getattr(vars(module).get("forward"), "refused", "")
            if refused:
                raise AssertionError(f"a stage runs uncompiled: {refused}")


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


def _uncut_step(pipe: Pipe, batch: dict[str, Any]) -> _Step:
    """A step of the uncut graph."""
    whole = copy.deepcopy(pipe.whole)
    losses: list[Tensor] = []
    output = UncutReference(whole, MICROBATCHES, loss).step(target=_nothing(), losses=losses, **batch)
    return _Step(output, losses, [whole])


def _step_of_ranks(
    pipe: Pipe,
    batch: dict[str, Any],
    specs: dict[str, Any],
    schedule: str = "1F1B",
    backend: str | None = None,
) -> _Step:
    """A step of ranks in one process.

    Args:
        specs: how arguments are cut into microbatches, where not along their first dimension.
        schedule: one stage a rank under 1F1B, and else two.
        backend: stages are compiled with it.
    """
    ranks = pipe.num_stages if schedule == "1F1B" else pipe.num_stages // 2
    placement = get_schedule(schedule)(pipe.num_stages, MICROBATCHES, ranks).stage_ranks

    def body(comm: Comm) -> tuple[Any, list[Tensor], list[nn.Module]]:
        own = copy.deepcopy(pipe)
        stages = [
            own.build_stage(index, comm=comm) for index, rank in enumerate(placement) if rank == comm.rank
        ]
        for stage in stages:
            if backend is not None:
                stage.compile(backend)
        losses: list[Tensor] = []
        kind = get_schedule_class(schedule)
        argument: Any = stages[0] if schedule == "1F1B" else stages
        runner = kind(argument, MICROBATCHES, loss, kwargs_chunk_spec=specs or None)
        output = runner.step(target=_nothing(), losses=losses, **batch)
        return output, losses, [stage.module for stage in stages]

    results = InProcessWorld(ranks).run(body)
    output, losses, _ = results[placement[-1]]
    return _Step(output, losses, [module for _, _, modules in results for module in modules])


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
