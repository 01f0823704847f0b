"""Whether a graph does what its model does in a forward pass, under the modes that are active around it."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from partita.capture.proving.samples import Sample
from partita.verification import verify
from partita.verification.comparing.compare import Tolerance

__all__ = ["NOT_KEPT", "forward_difference"]

NOT_KEPT = ("attribute", "printed text")
"""What no graph keeps: Python attributes that ``forward`` sets, and what it prints."""


def forward_difference(model: nn.Module, graph: GraphModule, sample: Sample, tolerance: Tolerance) -> str:
    """How the two differ; empty where they are equal, or where the model itself does not run."""
    result = verify(
        graph,
        model,
        sample.args,
        sample.kwargs,
        backward=False,
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        explain=False,
    )
    differences = [one for one in result.differences if one.kind not in NOT_KEPT]
    exceptions = [one.message for one in differences if one.kind == "exception"]
    if not differences or any("candidate: none" in message for message in exceptions):
        return ""
    return str(differences[0])
