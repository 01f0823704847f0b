"""``transformers.Trainer`` for models that train in a pipeline."""

from __future__ import annotations

import os
import random
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from partita.errors import ArgumentError, CheckpointError, NotSupported
from partita.integrations.broadcast_value import broadcast_value
from partita.integrations.example_batch import example_batches, open_sizes
from partita.integrations.refused_arguments import check_training_arguments
from partita.pipelining import (
    clip_grad_norm_,
    get_schedule_class,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from partita.pipelining.stages import Stage
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.runtime import ProcessGroupComm
from partita.runtime.publish_errors import publish_errors

__all__ = ["PipelineTrainer"]

_FOLDER = "pipeline"
"""Of a checkpoint: the stages and their optimizers."""


class PipelineTrainer(Trainer):
    """``transformers.Trainer`` with one stage of the model a process, as ``torchrun`` starts them.

    A step is one run of a schedule: each batch that the Trainer accumulates is one microbatch, so
    ``gradient_accumulation_steps`` is their number. All processes read the same batches, the first one's go
    into the model, labels included. Losses, gradient norms and parameters are bit for bit those of a
    ``Trainer`` in one process on CPU. Where the model draws random numbers they are not: dropout is keyed by
    (seed, step, microbatch, call site), so that it does not depend on the number of stages, and the Trainer
    draws from one generator. Evaluation runs each batch as one microbatch, so its losses are the same too.

    ``trainer.model`` stays whole, and on the device that it was on: only stages go to others. It has the
    trained parameters after ``train()`` and ``save_model()``; in between, each process trains its own stage.
    Checkpoints have the files that ``from_pretrained`` reads, and a folder ``pipeline`` with the stages and
    optimizers, from which any number of stages continues.

    Args:
        model: the model; the same on every process.
        args: of ``transformers``. What can't be followed in a pipeline is refused.
        options: the other arguments of ``Trainer``, by name.
        schedule: the name of a schedule with one stage a process.
        pipeline_options: those of `pipeline`, such as ``split_spec``, ``dynamic_shapes``, ``recompute`` or
            ``frontend``; without a source of cuts the stages are planned from measured costs.

    Raises:
        ArgumentError: an argument that can't be followed, or one process only.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        schedule: str = "1F1B",
        pipeline_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        check_training_arguments(args)
        for name in ("model_init", "optimizers"):
            if options.get(name) not in (None, (None, None)):
                raise ArgumentError(
                    f"{name} is given, but an optimizer of the uncut model trains nothing: give a model, and "
                    "optim or optimizer_cls_and_kwargs"
                )
        _read_the_same_batches(args)
        self._kind = get_schedule_class(schedule)
        self._pipeline_options = dict(pipeline_options or {})
        self._stage: Stage | None = None
        self._schedules: dict[int, PipelineSchedule] = {}
        self._group: list[dict[str, Any]] = []
        self._losses: deque[Tensor] = deque()
        super().__init__(model, args, **options)
        self.accelerator.dataloader_config.dispatch_batches = False

    # The pipeline.

    @property
    def stage(self) -> Stage:
        """This process's stage; the first use cuts the model. Collective then."""
        if self._stage is None:
            with _random_numbers_unchanged():
                options: dict[str, Any] = dict(self._pipeline_options)
                if not options.keys() & {"split_spec", "split_policy", "stages", "plan"}:
                    options |= {
                        "stages": dist.get_world_size(),
                        "microbatches": self.args.gradient_accumulation_steps,
                    }
                example, sizes = self._example()
                pipe = pipeline(self.model, (), example, **options | sizes)
            if pipe.num_stages != dist.get_world_size():
                raise ArgumentError(
                    f"the model is cut into {pipe.num_stages} stages, but there are {dist.get_world_size()} "
                    "processes: start as many, or cut at other places"
                )
            comm = ProcessGroupComm.from_group()
            self._stage = pipe.build_stage(comm.rank, self.args.device, comm=comm)
        return self._stage

    def _schedule(self, microbatches: int) -> PipelineSchedule:
        if microbatches not in self._schedules:
            self._schedules[microbatches] = self._kind(
                self.stage, microbatches, self._loss, scale_grads=False, seed=self.args.seed
            )
        return self._schedules[microbatches]

    def _example(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """A batch as the model is called with, and which sizes stay open, where lengths differ, between
        training and evaluation too.

        The batch has two samples at least, since a size of 1 can't stay open.
        """
        for_training = self.train_dataset is not None
        size = max(2, self.args.train_batch_size if for_training else self.args.eval_batch_size)
        sets = self.eval_dataset
        names = list(sets) if isinstance(sets, dict) else [None] if sets is not None else []
        loaders = [self.get_train_dataloader()] if for_training else []
        loaders += [self.get_eval_dataloader(name) for name in names]
        batches = [batch for loader in loaders for batch in example_batches(loader, size)]
        batch = self._prepare_inputs(batches[0])
        example = self._model_inputs(batch, self._get_num_items_in_batch([batch], self.args.device))
        example = {
            name: value.cpu() if isinstance(value, Tensor) else value for name, value in example.items()
        }
        sizes = self._pipeline_options.get("dynamic_shapes")
        if sizes is None and self._pipeline_options.get("frontend") != "modules":
            sizes = open_sizes(batches)
        if isinstance(sizes, Mapping):
            return example, {"dynamic_shapes": {name: sizes.get(name) for name in example}}
        return example, {}

    def _model_inputs(self, inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        """What the model is called with, as in ``compute_loss``."""
        arguments = dict(inputs)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            arguments.pop("labels", None)
        if self.model_accepts_loss_kwargs and num_items is not None:
            arguments["num_items_in_batch"] = num_items
        return arguments

    # Training.

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """As in ``Trainer``; the batches become the microbatches of one step."""
        samples, num_items = super().get_batch_samples(*args, **kwargs)
        self._group = samples
        self._losses.clear()
        return samples, num_items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the loss of one microbatch; the first of a step runs all of them."""
        if not self._losses:
            self._step(num_items_in_batch)
        return self._losses.popleft()

    def _step(self, num_items: Any) -> None:
        stage = self.stage
        stage.module.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batches = [self._prepare_inputs(batch) for batch in self._group]
        schedule = self._schedule(len(batches))
        schedule.load_state_dict({"steps": self.state.global_step})
        losses: list[Tensor] = []
        schedule.step(
            kwarg_mbs=[self._model_inputs(batch, num_items) for batch in batches] if stage.is_first else None,
            target_mbs=[(batch, num_items) for batch in batches] if stage.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        of_all = torch.stack(losses) if stage.is_last else None
        of_all = broadcast_value(schedule.comm, of_all, schedule.comm.size - 1, stage.device)
        self._losses.extend(of_all.to(self.args.device).unbind())

    def _loss(self, output: Any, target: tuple[dict[str, Any], Any]) -> Tensor:
        """The loss of a microbatch, with its share in the step, on the last stage."""
        batch, num_items = target
        loss = self.compute_loss(_Returns(self.model, output), dict(batch), num_items_in_batch=num_items)
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            by_items = self.model_accepts_loss_kwargs and num_items is not None
            scaled = by_items or self.compute_loss_func is not None
        return loss if scaled else loss / self.current_gradient_accumulation_steps

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``Trainer``. Afterwards ``trainer.model`` has the trained parameters."""
        result = super().train(*args, **kwargs)
        self._fill_model()
        return result

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The optimizer of this process's stage."""
        return super().create_optimizer(self.stage.module)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As in ``Trainer``, of the uncut model, whose names the stages have."""
        return super().get_decay_parameter_names(self.model)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm_(next(iter(self._schedules.values())), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        return clip_grad_norm_(next(iter(self._schedules.values())), float("inf"))

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.stage.module

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The whole model stays where it is; the stage is moved."""

    # Evaluation.

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As in ``Trainer``, with the output of the pipeline on every process."""
        of_model = self.label_smoother is None and self.compute_loss_func is None
        loss_only = prediction_loss_only and of_model and type(self).compute_loss is Trainer.compute_loss
        run = _Evaluates(self, loss_only=loss_only)
        return super().prediction_step(run, inputs, prediction_loss_only, ignore_keys)

    def _evaluated(self, inputs: dict[str, Any], *, loss_only: bool) -> Any:
        schedule = self._schedule(1)
        output = schedule.eval(**inputs) if self.stage.is_first else schedule.eval()
        if loss_only and isinstance(output, Mapping) and "loss" in output:
            output = {"loss": output["loss"]}  # logits may be large
        return broadcast_value(schedule.comm, output, schedule.comm.size - 1, self.stage.device)

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in ``Trainer``: files that ``from_pretrained`` reads, from the first process. Collective."""
        self._fill_model()
        super().save_model(output_dir, _internal_call)
        self._schedule(1).comm.barrier()  # the others may look for the files next

    def _fill_model(self) -> None:
        """Give the whole model every stage's parameters and buffers."""
        comm = self._schedule(1).comm
        for rank in range(comm.size):
            state = self.stage.module.state_dict() if rank == comm.rank else None
            self.model.load_state_dict(broadcast_value(comm, state, rank, self.stage.device), strict=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, comm = Path(output_dir) / _FOLDER, self._schedule(1).comm
        with publish_errors(comm, "removing an older checkpoint"):
            if comm.rank == 0 and folder.is_dir():  # of an earlier run; a Trainer writes over it
                shutil.rmtree(folder)
            comm.barrier()
        extra = {"lr_scheduler": self.lr_scheduler.state_dict()}
        save_checkpoint(folder, self.stage, _inner(self.optimizer), extra=extra)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint) / _FOLDER
        if folder.is_dir():
            load_checkpoint(folder, self.stage)
            return
        super()._load_from_checkpoint(resume_from_checkpoint, self.model)
        own, whole = self.stage.module.state_dict(), self.model.state_dict()
        self.stage.module.load_state_dict({name: whole[name] for name in own})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / _FOLDER
        if not folder.is_dir():
            raise CheckpointError(
                f"{os.fspath(checkpoint)!r} has no folder {_FOLDER!r} with the optimizers' state: resume "
                "from one that PipelineTrainer saved without save_only_model, or load its model with "
                "from_pretrained and start anew"
            )
        restored = load_checkpoint(folder, self.stage, _inner(self.optimizer))
        self.lr_scheduler.load_state_dict(restored.extra["lr_scheduler"])

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported.

        Raises:
            NotSupported: always.
        """
        raise NotSupported(
            "a PipelineTrainer trains the one model that it was given: make a trainer for each choice of "
            "hyperparameters"
        )


class _Returns(nn.Module):
    """Stands for a model that has been called already."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__()
        self._name = type(model).__name__
        self._output = output

    def _get_name(self) -> str:
        return self._name

    def forward(self, **_inputs: Any) -> Any:
        """Return what the pipeline returned."""
        return self._output


class _Evaluates(nn.Module):
    """Stands for a model whose calls run the pipeline."""

    def __init__(self, trainer: PipelineTrainer, *, loss_only: bool) -> None:
        super().__init__()
        self._run = partial(trainer._evaluated, loss_only=loss_only)  # noqa: SLF001 - a part of the trainer
        self._name = type(trainer.model).__name__

    def _get_name(self) -> str:
        return self._name

    def forward(self, **inputs: Any) -> Any:
        """Return the output, on every process."""
        return self._run(inputs)


def _read_the_same_batches(args: TrainingArguments) -> None:
    """Let ``accelerate`` take each process for the only one: it divides no data then, and gathers nothing."""
    _ = args.device  # sets up torch.distributed
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise ArgumentError(
            "PipelineTrainer runs in 1 process, and a pipeline needs one a stage: start the script with "
            "torchrun --nproc-per-node 2, or use transformers.Trainer"
        )
    state = args.distributed_state
    state.distributed_type = DistributedType.NO
    state.num_processes = 1


@contextmanager
def _random_numbers_unchanged() -> Iterator[None]:
    """Leave the generators of torch, Python and numpy as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _inner(optimizer: Any) -> Optimizer:
    """The optimizer that ``accelerate`` has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
