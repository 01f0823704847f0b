"""What prepares the steps of a rank, with all that looks on."""

from __future__ import annotations

from collections.abc import Mapping

from partita.pipelining.stages.own_modules.manual import PipelineStage
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.preparing.changed_settings import ChangedSettings
from partita.pipelining.steps.preparing.clipped_apart import ClippedApart
from partita.pipelining.steps.preparing.outdated_copies import OutdatedCopies
from partita.pipelining.steps.preparing.preparation import CapturedPreparation, StepPreparation
from partita.pipelining.steps.preparing.same_data import SameData
from partita.pipelining.steps.preparing.shape_exchange import ShapeExchange
from partita.pipelining.steps.preparing.stale_optimizers import refuse_stale_optimizers
from partita.pipelining.steps.preparing.whole_model_optimizers import refuse_whole_model_optimizers
from partita.runtime import Comm

__all__ = ["step_preparation"]


def step_preparation(
    comm: Comm, stages: Mapping[int, Stage], stage_ranks: tuple[int, ...], microbatches: int
) -> StepPreparation:
    """Return it. As long as it lives, it also watches the optimizers of this process.

    Args:
        stages: those of this rank, by index.
        stage_ranks: the rank of each stage.
        microbatches: how many a step has.
    """
    own_stages = list(stages.values())
    manual = {index: stage for index, stage in stages.items() if isinstance(stage, PipelineStage)}
    preparation: StepPreparation = (
        ShapeExchange(manual, comm, stage_ranks)
        if manual
        else CapturedPreparation(stages, comm, microbatches)
    )
    preparation = SameData(preparation, comm, stage_ranks, named=not manual)
    preparation = ClippedApart(preparation, comm, own_stages)
    preparation = ChangedSettings(preparation, own_stages)
    preparation = OutdatedCopies(preparation, comm, own_stages, stage_ranks)
    refuse_stale_optimizers(preparation, stages)
    refuse_whole_model_optimizers(preparation, comm, stages, len(stage_ranks))
    return preparation
