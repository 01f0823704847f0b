"""What running pieces needs, whatever they were cut for: ranks that talk, microbatches, random numbers,
traces.
"""

from __future__ import annotations

from partita.runtime.chunk_specs import Reduce, Replicate, TensorChunkSpec, WeightedMean
from partita.runtime.comms._operation import finish_all, wait_all
from partita.runtime.comms.comm import MAX_TAG, Comm, Handle
from partita.runtime.comms.in_process import InProcessComm, InProcessWorld
from partita.runtime.comms.process_group import ProcessGroupComm
from partita.runtime.failures.failure import FailureRecord
from partita.runtime.microbatches import (
    CutBatch,
    MicrobatchPlan,
    cut_batch,
    merge,
    plan_microbatches,
    split_args,
    split_tree,
)
from partita.runtime.piece_runner import PieceRunner, PlainRunner
from partita.runtime.rng import RandomKey, enter_site, key_random_nodes, keyed, site_seed
from partita.runtime.trace import (
    NULL_TRACER,
    BusyTime,
    NullTracer,
    Recorder,
    TraceEvent,
    Tracer,
    align,
    gather,
    measure_clock_offsets,
)

__all__ = [
    "MAX_TAG",
    "NULL_TRACER",
    "BusyTime",
    "Comm",
    "CutBatch",
    "FailureRecord",
    "Handle",
    "InProcessComm",
    "InProcessWorld",
    "MicrobatchPlan",
    "NullTracer",
    "PieceRunner",
    "PlainRunner",
    "ProcessGroupComm",
    "RandomKey",
    "Recorder",
    "Reduce",
    "Replicate",
    "TensorChunkSpec",
    "TraceEvent",
    "Tracer",
    "WeightedMean",
    "align",
    "cut_batch",
    "enter_site",
    "finish_all",
    "gather",
    "key_random_nodes",
    "keyed",
    "measure_clock_offsets",
    "merge",
    "plan_microbatches",
    "site_seed",
    "split_args",
    "split_tree",
    "wait_all",
]
