"""What ``torch.compile`` raises where it can't compile a function, and why."""

from __future__ import annotations

import re

from torch._dynamo.exc import TorchDynamoException

__all__ = ["is_refusal", "refusal_text"]

_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]+)')


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that a function could not be compiled. Nothing of it has run then."""
    return isinstance(error, TorchDynamoException)


def refusal_text(error: BaseException) -> str:
    """Why, in one line, and the place in the user's code where there is one."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    about = {name: value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    if about.get("Explanation"):
        reason = f"{reason} ({about['Explanation'].rstrip('.')})"
    _, _, users = text.partition("from user code:")
    places = list(_PLACE.finditer(users))
    if not places:
        return reason
    last = places[-1]
    return f"{reason}, at {last['file']}:{last['line']}: {last['code'].strip()}"
