"""Data parallel training: gradients are averaged over all ranks while the backward pass, eager or compiled,
still runs.
"""

from __future__ import annotations

from partita.ddp.buckets.bucket_report import BucketRow, BucketTimes, PassTimes
from partita.ddp.buckets.comm_hooks import CommHook, bf16_compress, fp16_compress
from partita.ddp.compiled.backend import partita_ddp
from partita.ddp.forward_cut.buckets import Bucket
from partita.ddp.forward_cut.optimizer import DDPOptimizer, use_partita_ddp_optimizer
from partita.ddp.reducing.tuning import measure_links
from partita.ddp.replicas.replicate import replicate
from partita.ddp.replicas.replicated import Replicated
from partita.ddp.replicas.replication import Replication

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
