"""The checks of ``partita verify`` one after the other, from options to outcomes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout

import torch

from partita.capture.proving.proof import without_values
from partita.cli.models.hugging_face_values import with_random_values
from partita.cli.models.model_source import ModelSource
from partita.cli.models.user_file import Built
from partita.cli.options.cut_options import CutRequest
from partita.cli.options.schedule_cases import stages_a_rank
from partita.cli.output.progress import progress_bar
from partita.cli.verifying.verify_checks import VerifyCheck, compare_compiled, compare_cut
from partita.cli.verifying.verify_step_check import compare_step, step_schedule
from partita.errors import UsageError
from partita.planning import Schedule, get_schedule

__all__ = ["compile_checks", "cut_checks", "cut_options"]


def cut_options(
    stages: int | None, split_at: list[str] | None, schedule: str | None, microbatches: int | None
) -> tuple[CutRequest, Schedule | None]:
    """Where to cut, and the step, which is made here so that its errors come before the model."""
    name = schedule or "1F1B"
    if stages is None and not split_at:
        stages = 2 * stages_a_rank(get_schedule(name))
    cut = CutRequest(stages, tuple(split_at or ()))
    if microbatches == 0:
        return cut, None
    return cut, step_schedule(name, cut.number, 4 if microbatches is None else microbatches)


def _built(source: ModelSource) -> Built:
    torch.manual_seed(0)  # the weights of a Hugging Face model
    with redirect_stdout(sys.stderr):
        built = source.build("cpu")
    if source.hugging_face is not None:
        return with_random_values(built)
    if reason := without_values(built.model, built.args, built.kwargs):
        raise UsageError(f"{source.title}: {reason}: make it with values, on the CPU")
    return built


def cut_checks(source: ModelSource, cut: CutRequest, schedule: Schedule | None) -> Iterator[VerifyCheck]:
    with progress_bar("cutting the model"):
        built = _built(source)
        pipe = cut.cut(built)
    with progress_bar("comparing both modes") as progress:
        for number, training in enumerate((True, False)):
            yield compare_cut(pipe, built, training)
            progress((number + 1) / 2)
    if schedule is not None:
        with progress_bar("comparing a step"):
            yield compare_step(pipe, built, schedule)


def compile_checks(
    source: ModelSource, backend: str, tolerance: tuple[float, float] | None
) -> Iterator[VerifyCheck]:
    built = _built(source)
    with progress_bar("compiling and comparing both modes") as progress:
        for number, training in enumerate((True, False)):
            yield compare_compiled(built, training, backend, tolerance)
            progress((number + 1) / 2)
