"""Pickling the input checks of an exported program.

``ExportedProgram.module()`` puts a module at the head of its graph whose ``forward`` was compiled from text
that nobody keeps, so that it can't be pickled. Its code object can: by ``marshal``, for the same version of
Python.
"""

from __future__ import annotations

import marshal
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from partita._torch.modules.contents import is_guards_module
from partita.errors import GraphError

__all__ = ["GuardsRecord", "recorded", "restored"]


@dataclass(frozen=True, slots=True)
class GuardsRecord:
    """The code of a module that checks inputs, and the version of Python that it is for."""

    code: bytes
    version: tuple[int, int]

    def build(self) -> nn.Module:
        """Return a module with this code.

        Raises:
            GraphError: it was pickled under another version of Python.
        """
        if self.version != sys.version_info[:2]:
            wanted = ".".join(map(str, self.version))
            raise GraphError(
                f"the input checks of this exported program were pickled under Python {wanted} and can't be "
                f"read by this one: use Python {wanted}, or capture with "
                "ExportedProgram.module(check_guards=False)"
            )
        from torch._dynamo.decorators import dont_skip_tracing
        from torch.export._unlift import GuardsFn
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        namespace = {**SYMPY_INTERP, "math": math, "inf": math.inf, "torch": torch}
        module = GuardsFn()
        module.forward = dont_skip_tracing(FunctionType(marshal.loads(self.code), namespace, "_"))  # type: ignore[method-assign]
        module._is_impure = True  # type: ignore[assignment]
        return module


def recorded(children: Mapping[str, Any]) -> dict[str, Any]:
    """Return the children of a module with a `GuardsRecord` for each that checks inputs."""
    return {
        name: _record(child) if child is not None and is_guards_module(child) else child
        for name, child in children.items()
    }


def restored(children: Mapping[str, Any]) -> dict[str, Any]:
    """Return the children that `recorded` was given."""
    return {
        name: child.build() if isinstance(child, GuardsRecord) else child for name, child in children.items()
    }


def _record(module: nn.Module) -> Any:
    """Return the record of such a module; the module itself where its code can't be found."""
    cells = getattr(module.forward, "__closure__", None) or ()
    for cell in cells:
        function = cell.cell_contents
        if isinstance(function, FunctionType) and not function.__closure__:
            return GuardsRecord(marshal.dumps(function.__code__), sys.version_info[:2])
    return module
