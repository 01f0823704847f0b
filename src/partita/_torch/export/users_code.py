"""Which files hold the code of a model and its user."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import mpmath  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
import torch

__all__ = ["is_users"]

_PARTITA = str(Path(__file__).parents[2])
_NOT_THE_USERS = (*(str(Path(module.__path__[0])) for module in (torch, sympy, mpmath)), _PARTITA, "<")
_PYTHON = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
"""What is installed may lie within Python's own folder."""


def is_users(filename: str) -> bool:
    """Whether a file is the user's own code, or of a library of models, and not torch's, partita's or
    Python's.

    >>> is_users("train.py"), is_users(torch.__file__)
    (True, False)
    """
    if filename.startswith(_NOT_THE_USERS):
        return False
    return not filename.startswith(_PYTHON) or any(folder in filename for folder in _INSTALLED)
