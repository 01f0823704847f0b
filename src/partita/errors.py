"""Every error that partita raises on purpose.

Each also subclasses the built-in that a caller would reach for, so ``except ValueError`` works as expected::

    PartitaError
    ├── ArgumentError (ValueError)            an argument that can't be used as given
    │   ├── ArgumentTypeError (TypeError)     of a type that can't be used
    │   ├── ModuleNameError (AttributeError)  a model has no submodule of that name
    │   ├── PieceNameError (KeyError)         no piece of that name
    │   ├── StageIndexError (IndexError)      no stage of that number
    │   └── UsageError                        an option of a command
    ├── CaptureError (RuntimeError)           a model could not be turned into a graph
    ├── GraphError (ValueError)               a graph that is malformed, or misses an attribute
    ├── SplitError (ValueError)
    │   ├── AssignmentError                   a node without a key, an unknown node, an unhashable key
    │   ├── OrderConflict (RuntimeError)      pieces that can't be ordered; carries the chain of nodes
    │   └── RegionError                       an autocast (or other) region that is never left
    ├── PlanError (ValueError)
    │   ├── InfeasiblePlan                    more stages than units, not enough memory
    │   └── ScheduleError                     a schedule that breaks a rule
    ├── ExecutionError (RuntimeError)
    │   ├── PeerFailed (ConnectionError)      another rank raised or died; carries rank and its traceback
    │   ├── DeadlockError                     ranks wait for each other
    │   └── SignatureMismatch (ValueError)    two sides of an edge disagree about what crosses it
    ├── CheckpointError (ValueError)          state that can't be saved or loaded as asked
    ├── MicrobatchError (ValueError)          a batch that can't be cut as asked
    ├── NotSupported (NotImplementedError)    what partita, or a subclass of the user's, does not do
    ├── ReportError (ValueError)              report data that contradicts itself, or can't be read
    └── VerificationFailed (AssertionError)   `Verification.check()` found a difference

    CostlyCut (UserWarning)                   a cut sends what nobody needs
    LongCapture (UserWarning)                 a loop of the model becomes a very large graph
    NotProven (UserWarning)                   what was captured could not be compared with the model
    NotCompiled (UserWarning)                 a stage or graph that was to be compiled runs as it is
    ReplicasDiffer (UserWarning)              each rank trains a model of its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AssignmentError",
    "CaptureError",
    "CheckpointError",
    "CostlyCut",
    "DeadlockError",
    "ExecutionError",
    "GraphError",
    "InfeasiblePlan",
    "LongCapture",
    "MicrobatchError",
    "ModuleNameError",
    "NotCompiled",
    "NotProven",
    "NotSupported",
    "OrderConflict",
    "PartitaError",
    "PeerFailed",
    "PieceNameError",
    "PlanError",
    "RegionError",
    "ReplicasDiffer",
    "ReportError",
    "ScheduleError",
    "SignatureMismatch",
    "SplitError",
    "StageIndexError",
    "UsageError",
    "VerificationFailed",
]


class PartitaError(Exception):
    """The root of the tree: whatever partita raises on purpose is one of these."""


class ArgumentError(PartitaError, ValueError):
    """An argument that can't be used as given: out of its range, unknown, or one that another excludes."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a type that can't be used."""


class ModuleNameError(ArgumentError, AttributeError):
    """A model has no submodule of that name."""


class PieceNameError(ArgumentError, KeyError):
    """A split has no piece of that name."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class StageIndexError(ArgumentError, IndexError):
    """A pipe has no stage of that number."""


class UsageError(ArgumentError):
    """An option of a command that can't be used as given."""


class CaptureError(PartitaError, RuntimeError):
    """A model could not be turned into a graph."""


class GraphError(PartitaError, ValueError):
    """A graph that is malformed, or names an attribute that its module does not have."""


class SplitError(PartitaError, ValueError):
    """A graph could not be cut as asked."""


class AssignmentError(SplitError):
    """The assignment misses a node, names one that does not exist, or returns an unhashable key."""


class OrderConflict(SplitError, RuntimeError):
    """No order of the pieces keeps what can be observed.

    Attributes:
        chain: node names along the cycle, first and last in the same piece.
    """

    def __init__(self, message: str, chain: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.chain = tuple(chain)

    def __reduce__(self) -> tuple[type[OrderConflict], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.chain)


class RegionError(SplitError):
    """A region (autocast, inference mode) that the graph enters and never leaves, or leaves twice."""


class PlanError(PartitaError, ValueError):
    """A plan could not be made or read."""


class InfeasiblePlan(PlanError):
    """No plan meets the request: more stages than units, or not enough memory.

    Attributes:
        reason: what can't be, without what to do about it; the whole message where no change is known.
        changes: what would do: a value for an argument of `partita.planning.search` ("ranks": of its cluster;
            "memory_bytes": of each of them; "stages": of all ranks together), each with which a plan was
            found where it alone was changed; the smallest change first.
    """

    def __init__(self, message: str, reason: str = "", changes: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.changes = dict(changes or {})

    def __reduce__(self) -> tuple[type[InfeasiblePlan], tuple[str, str, dict[str, Any]]]:
        return type(self), (str(self), self.reason, self.changes)


class ScheduleError(PlanError):
    """A schedule breaks a rule: an action missing, doubled, out of order, or a deadlock."""


class ExecutionError(PartitaError, RuntimeError):
    """Something failed while pieces were running."""


class PeerFailed(ExecutionError, ConnectionError):
    """Another rank raised or died.

    Attributes:
        rank: the rank that failed first.
        traceback_text: its own traceback, or an empty string where it died without a word.
    """

    def __init__(self, message: str, rank: int, traceback_text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[str, int, str]]:
        return type(self), (str(self), self.rank, self.traceback_text)


class DeadlockError(ExecutionError):
    """Ranks wait for each other."""


class SignatureMismatch(ExecutionError, ValueError):
    """The two sides of an edge disagree about what crosses it (shape, dtype, mode, microbatches)."""


class CheckpointError(PartitaError, ValueError):
    """State that can't be saved or loaded as asked: a missing key, another shape, copies that differ."""


class MicrobatchError(PartitaError, ValueError):
    """A batch that can't be cut into microbatches as asked."""


class NotSupported(PartitaError, NotImplementedError):
    """What partita does not do, or what a subclass has to do and does not."""


class ReportError(PartitaError, ValueError):
    """The data of a report contradicts itself, or a kept report can't be read."""


class VerificationFailed(PartitaError, AssertionError):
    """`Verification.check()` found a difference between candidate and reference."""


class CostlyCut(UserWarning):
    """A cut sends values from stage to stage that nobody needs; results are right all the same."""


class LongCapture(UserWarning):
    """Capture goes through a loop of the model step by step, and takes long; its result is right."""


class NotCompiled(UserWarning):
    """A stage or graph that was to be compiled can't be: it runs as it is, with the same results."""


class NotProven(UserWarning):
    """What was captured could not be compared with the eager model: it may differ from it without a word."""


class ReplicasDiffer(UserWarning):
    """Each rank trains a model of its own: weights are not equal, or nothing averages their gradients."""
