"""Around a step: clipping, loss scaling, weights of the loss, metrics, and the uncut model beside it."""

from __future__ import annotations

from partita.pipelining.steps.loss_weights import LossWeights
from partita.pipelining.training.clipping import clip_grad_norm_
from partita.pipelining.training.reference import UncutReference
from partita.pipelining.training.scaler import GradScaler
from partita.pipelining.training.step_metrics import StepMeter, StepMetrics, log_to
from partita.pipelining.training.verify_step import verify_step

__all__ = [
    "GradScaler",
    "LossWeights",
    "StepMeter",
    "StepMetrics",
    "UncutReference",
    "clip_grad_norm_",
    "log_to",
    "verify_step",
]
