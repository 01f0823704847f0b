"""Cut a PyTorch model's graph into pieces, run them, and prove that they do what the whole did.

Names load on first use, so that ``import partita`` costs next to nothing and ``import partita.planning``
needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from partita._version import __version__

if TYPE_CHECKING:
    from partita.splitter import Split, split
    from partita.verification import Verification, verify

__all__ = ["Split", "Verification", "__version__", "split", "verify"]

_HOME = {
    "Split": "partita.splitter",
    "Verification": "partita.verification",
    "split": "partita.splitter",
    "verify": "partita.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'partita' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
