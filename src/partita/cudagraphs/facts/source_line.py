"""The line of the user's code that a node comes from."""

from __future__ import annotations

import re

from torch.fx import Node

__all__ = ["source_line"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in .*)?(?:\n\s*(?P<code>[^\n]+))?')


def source_line(node: Node) -> str:
    """Return ``file:line: code`` from the innermost frame of the node's stack trace; empty where it has none.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> node = graph.placeholder("x")
    >>> node.meta["stack_trace"] = '  File "model.py", line 3, in forward\\n    return x.item()'
    >>> source_line(node)
    'model.py:3: return x.item()'
    """
    frames = list(_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    if not frames:
        return ""
    frame = frames[-1]
    place = f"{frame['file']}:{frame['line']}"
    return f"{place}: {frame['code'].strip()}" if frame["code"] else place
