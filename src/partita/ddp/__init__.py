"""Data parallel training: gradients are averaged over all ranks while the backward pass, eager or compiled,
still runs.
"""

from __future__ import annotations

from partita.ddp.backend import partita_ddp
from partita.ddp.hooks import CommHook, bf16_compress, fp16_compress
from partita.ddp.listing import BucketRow, BucketTimes, PassTimes
from partita.ddp.optimizer import DDPOptimizer, use_partita_ddp_optimizer
from partita.ddp.optimizer_buckets import Bucket
from partita.ddp.replicate import Replicated, Replication, replicate
from partita.ddp.tuning import measure_links

__all__ = [
    "Bucket",
    "BucketRow",
    "BucketTimes",
    "CommHook",
    "DDPOptimizer",
    "PassTimes",
    "Replicated",
    "Replication",
    "bf16_compress",
    "fp16_compress",
    "measure_links",
    "partita_ddp",
    "replicate",
    "use_partita_ddp_optimizer",
]
