"""Which nodes are captured together, and which can't be."""

from __future__ import annotations

from partita.cudagraphs.regions.capturable import CaptureRules, Refusal
from partita.cudagraphs.regions.grouping import Region, RegionPlan, find_regions
from partita.cudagraphs.regions.launch_savings import SavingModel
from partita.cudagraphs.regions.partition import partition_cudagraphs

__all__ = [
    "CaptureRules",
    "Refusal",
    "Region",
    "RegionPlan",
    "SavingModel",
    "find_regions",
    "partition_cudagraphs",
]
