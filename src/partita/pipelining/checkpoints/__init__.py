"""Checkpoints that do not know how the model was cut."""

from __future__ import annotations

from partita.pipelining.checkpoints.checkpoint import Restored, load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.latest import latest_checkpoint
from partita.pipelining.checkpoints.pretrained.export_pretrained import export_pretrained
from partita.pipelining.checkpoints.pretrained.import_pretrained import import_pretrained
from partita.pipelining.checkpoints.snapshots import Snapshots
from partita.pipelining.checkpoints.state_report import StateReport, state_report
from partita.pipelining.checkpoints.weight_files import load_safetensors

__all__ = [
    "Restored",
    "Snapshots",
    "StateReport",
    "export_pretrained",
    "import_pretrained",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "state_report",
]
