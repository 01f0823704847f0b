"""What ``partita verify`` compares, and what comes of it as plain values."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from partita.cli.models.user_file import Built
from partita.errors import UsageError
from partita.pipelining.frontends.graph.pipe import GraphPipe
from partita.splitter import Piece
from partita.verification import Difference, Verification, verify

__all__ = ["VerifyCheck", "compare_compiled", "compare_cut"]

_CLOSE = {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5), torch.float16: (1e-3, 1e-5)}
_BFLOAT16_CLOSE = (1.6e-2, 1e-5)
"""By dtype the tolerances (relative, absolute) that ``torch.testing.assert_close`` has by default."""


@dataclass(frozen=True)
class VerifyCheck:
    """One thing that was compared.

    Attributes:
        name: what.
        equal: whether nothing differs.
        text: the outcome, for people.
        differences: the first is the most telling.
        compared: how many things of each sort.
        hints: what may explain the differences.
        left_out: what the run changed and the candidate does not keep, as it says itself.
    """

    name: str
    equal: bool
    text: str
    differences: tuple[Difference, ...] = ()
    compared: dict[str, int] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, result: Verification) -> VerifyCheck:
        """What `verify` found.

        Raises:
            UsageError: the model itself raises with its example.
        """
        if result.raised is not None:
            raise UsageError(f"the model can't run its own example in {name}: {result.raised}")
        compared = dict(result.compared)
        return cls(name, result.ok, str(result), result.differences, compared, result.hints, result.left_out)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "equal": self.equal,
            "differences": [asdict(difference) for difference in self.differences],
            "compared": self.compared,
            "hints": self.hints,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class _CutGraph:
    """The pieces of a pipe, as `verify` takes a split."""

    module: GraphModule
    pieces: tuple[Piece, ...]


def compare_cut(pipe: GraphPipe, built: Built, training: bool) -> VerifyCheck:
    """Run all stages in this process, and the model itself; compare everything that can be observed.

    Where they differ, the pieces are compared with the whole graph too, which names the piece and the node.
    """
    model = built.model.train(training)
    pipe.train(training)
    name = _mode(training)
    with redirect_stdout(sys.stderr):
        check = VerifyCheck.of(name, verify(pipe, model, built.args, built.kwargs))
        if check.equal or not isinstance(pipe.whole, GraphModule):
            return check
        cut = _CutGraph(pipe.split_gm, pipe.pieces)
        located = verify(cut, pipe.whole, built.args, built.kwargs)
    if located.ok:
        note = "the stages do what the captured graph does: the graph is not the model"
        return replace(check, text=f"{check.text}\n   {note}")
    return VerifyCheck.of(name, located)


def compare_compiled(
    built: Built, training: bool, backend: str, tolerance: tuple[float, float] | None
) -> VerifyCheck:
    """Compare the model under ``torch.compile`` with the model itself.

    Args:
        backend: ``aot_eager``, which changes no number, or ``inductor``, with eager random numbers.
        tolerance: relative and absolute; None: bit for bit, or for ``inductor`` by the least exact dtype.
    """
    model = built.model.train(training)
    rtol, atol = _tolerance(model, backend) if tolerance is None else tolerance
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    with redirect_stdout(sys.stderr):
        compiled = torch.compile(model, backend=backend, options=options)
        result = verify(compiled, model, built.args, built.kwargs, rtol=rtol, atol=atol)
    return VerifyCheck.of(_mode(training), result)


def _mode(training: bool) -> str:
    return "training mode" if training else "evaluation mode"


def _tolerance(model: nn.Module, backend: str) -> tuple[float, float]:
    if backend != "inductor":
        return 0.0, 0.0
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max((_CLOSE.get(dtype, _BFLOAT16_CLOSE) for dtype in dtypes), default=_CLOSE[torch.float32])
