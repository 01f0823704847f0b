"""The borders of FSDP: marking them for Dynamo, checking them, cutting pipeline stages there."""

from __future__ import annotations

from partita.fsdp.annotate import annotate_modules_for_dynamo
from partita.fsdp.audit import Audit, audit
from partita.fsdp.borders import split_points_at_fsdp

__all__ = ["Audit", "annotate_modules_for_dynamo", "audit", "split_points_at_fsdp"]
