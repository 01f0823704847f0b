"""What torch's own tools are told of a forward graph that is cut for DDP: ``TORCH_LOGS=ddp_graphs``, the
structured trace that ``tlparse`` reads, and the reasons that ``torch._dynamo.explain`` lists.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping

from torch._dynamo.output_graph import GraphCompileReason
from torch._logging._internal import getArtifactLogger, trace_structured
from torch.fx import GraphModule

__all__ = ["name_cut", "show_compiled", "show_pieces"]

# Under the name of torch's optimizer: handlers and levels of TORCH_LOGS hold for what lies below "torch".
_LOG = getArtifactLogger("torch._dynamo.backends.distributed", "ddp_graphs")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def show_pieces(whole: GraphModule, stitched: GraphModule, pieces: Mapping[str, GraphModule]) -> None:
    """Log and trace a graph, the graph that calls its pieces, and the pieces."""
    if _LOG.isEnabledFor(10):
        named = {"orig graph": whole, "split graph": stitched}
        named |= {f"{name} graph": piece for name, piece in pieces.items()}
        _LOG.debug("%s", "\n".join(f"---{title}---\n{gm.graph}\n" for title, gm in named.items()))
    trace_structured(
        "optimize_ddp_split_graph", payload_fn=lambda: stitched.print_readable(print_output=False)
    )
    for name, piece in pieces.items():
        trace_structured(
            "optimize_ddp_split_child",
            lambda name=name: {"name": name},  # type: ignore[misc]
            payload_fn=lambda piece=piece: piece.print_readable(print_output=False),  # type: ignore[misc]
        )


def show_compiled(stitched: GraphModule) -> None:
    """Log the graph that calls the compiled pieces."""
    _LOG.debug("---final graph---\n%s\n", stitched.graph)


def name_cut(piece: GraphModule, reason: str) -> None:
    """Say why there is a graph of its own, with the user's line where it begins."""
    stacks = (node.stack_trace for node in piece.graph.nodes if node.op not in ("placeholder", "get_attr"))
    piece.compile_subgraph_reason = GraphCompileReason(reason, _frames(next(filter(None, stacks), None)))  # type: ignore[assignment]


def _frames(stack: str | None) -> list[traceback.FrameSummary]:
    return [
        traceback.FrameSummary(frame["file"], int(frame["line"]), frame["function"])
        for frame in _FRAME.finditer(stack or "")
    ]
