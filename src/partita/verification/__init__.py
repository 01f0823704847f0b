"""The proof that a cut model does what it did: run both, compare everything, explain the difference."""

from __future__ import annotations

from partita.verification.comparing.compare import Tolerance
from partita.verification.result import Difference, DifferenceKind, Verification
from partita.verification.verify import verify

__all__ = ["Difference", "DifferenceKind", "Tolerance", "Verification", "verify"]
