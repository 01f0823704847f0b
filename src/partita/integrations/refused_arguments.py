"""Training arguments that mean nothing, or something else, where a model trains in a pipeline."""

from __future__ import annotations

from typing import Any

from partita.errors import ArgumentError

__all__ = ["check_training_arguments"]

_NO_DDP = "it is for DistributedDataParallel, and a pipeline has none: leave it out"
_HALF = "the stages run in the precision of the model: load it with dtype=torch.bfloat16"
_RECOMPUTE = "the layers are cut out of the model: give pipeline_options={'recompute': True}"
_WAY_OUT = {
    "activation_checkpointing": _RECOMPUTE,
    "auto_find_batch_size": "a process that runs out of memory stops all others: give the batch size",
    "bf16": _HALF,
    "bf16_full_eval": _HALF,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "debug": "its hooks stay on the uncut model, which is not run: leave it out",
    "deepspeed": "DeepSpeed runs whole models: leave it out",
    "enable_jit_checkpoint": "processes are told to save at different steps: give save_strategy='steps'",
    "fp16": "its loss scaler sees one process's gradients only: load the model with dtype=torch.bfloat16, or "
    "write the loop with partita.pipelining.GradScaler",
    "fp16_full_eval": _HALF,
    "fsdp": "it shards whole models: leave it out",
    "gradient_checkpointing": _RECOMPUTE,
    "neftune_noise_alpha": "its hook stays on the uncut model, which is not run: leave it out",
    "optim_target_modules": "it looks for modules of the uncut model: choose an optim that takes parameters",
    "parallelism_config": "all processes are stages of one pipeline: leave it out",
    "save_on_each_node": "a checkpoint is one folder that all processes write to: leave it out",
    "torch_compile": "it compiles the uncut model, which is not run: leave it out",
    "torch_empty_cache_steps": "a step is one run of all stages: leave it out",
    "use_liger_kernel": "it changes modules after the cut: apply it to the model before, by hand",
}
_NEEDS_MODEL = ("lomo", "adalomo", "galore", "apollo", "layerwise", "muon", "dion")


def check_training_arguments(args: Any) -> None:
    """Refuse ``TrainingArguments`` that a `PipelineTrainer` can't follow.

    Raises:
        ArgumentError: names the first one, and says what to do.
    """
    for name, way_out in _WAY_OUT.items():
        value = getattr(args, name, None)
        if value is not None and value is not False and value != [] and value != {}:
            raise ArgumentError(f"{name}={value!r} can't be followed in a pipeline: {way_out}")
    optim = str(getattr(args.optim, "value", args.optim))
    if any(part in optim for part in _NEEDS_MODEL):
        raise ArgumentError(
            f"optim={optim!r} looks into the uncut model, which is not run: choose one that takes "
            "parameters, such as 'adamw_torch'"
        )
    if args.accelerator_config is not None and args.accelerator_config.dispatch_batches:
        raise ArgumentError(
            "dispatch_batches=True divides batches among processes, but all stages see the same ones: leave "
            "it out"
        )
