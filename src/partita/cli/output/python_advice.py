"""Advice of the library's errors that a command has no option for."""

from __future__ import annotations

import re

__all__ = ["python_advice"]

_ARGUMENT = re.compile(r"(?<![\w.-])(dynamic_shapes|frontend|modes|multi_use_param_spec|prove|split_spec)=")
_OPTIONS = {"split_spec": "--split-at"}


def python_advice(message: str) -> str:
    """Return where the arguments belong that a message names; empty where it names none.

    >>> python_advice('cut the model at its blocks: frontend="modules"')
    'frontend= is an argument of partita.pipelining.pipeline(), in Python: no option of a command'
    """
    names = sorted(set(_ARGUMENT.findall(message)))
    if not names:
        return ""
    listed = " and ".join(f"{name}=" for name in names)
    are = "are arguments" if len(names) > 1 else "is an argument"
    options = [f"{_OPTIONS[name]} stands for {name}= in partita split" for name in names if name in _OPTIONS]
    where = "; ".join(options) or "no option of a command"
    return f"{listed} {are} of partita.pipelining.pipeline(), in Python: {where}"
