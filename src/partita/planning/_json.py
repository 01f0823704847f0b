"""How planning's dataclasses are written as JSON and read back; errors say where the text is wrong."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from partita.errors import PlanError

__all__ = ["read", "write"]

T = TypeVar("T")

VERSION = 1
"""Raised when a file written before can no longer be read as it stands."""


def write(value: Any, format_name: str) -> str:
    """The JSON text of a dataclass, headed by the name of its format and its version.

    Infinity, which JSON has no number for, is written as the string ``"inf"``, and what has a text form of
    its own (a class method `parse`) as that text.
    """
    body = {"format": format_name, "version": VERSION, **_encode(value)}
    return json.dumps(body, indent=2, allow_nan=False)


def read(text: str, kind: type[T], format_name: str) -> T:
    """The dataclass `kind` that `write` made `text` from.

    Raises:
        PlanError: not JSON, another format or version, or a field that is missing, unknown, there twice or of
        the wrong type.
    """
    try:
        data = json.loads(text, object_pairs_hook=_each_once)
    except PlanError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(
            f"this is not JSON ({error}): give the text that {kind.__name__}.to_json() wrote"
        ) from error
    if not isinstance(data, dict):
        raise PlanError(f"expected a JSON object with format {format_name!r}, found {type(data).__name__}")
    written = data.pop("format", None)
    if written != format_name:
        raise PlanError(
            f"the format is {written!r}, expected {format_name!r}: this is not a saved {kind.__name__}"
        )
    version = data.pop("version", None)
    if version != VERSION or isinstance(version, bool):
        raise PlanError(f"{format_name} version {version!r} can't be read, only {VERSION}: save it again")
    return _decode_object(kind, data, kind.__name__)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list",
    frozenset: "a list",
}
"""What a field of a class takes, as JSON has it; all others take text."""


def _encode(value: Any) -> Any:
    if hasattr(value, "parse"):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a field that is there twice, Python's reader would take the last."""
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"the field {twice!r} is there twice: remove one, or save again with to_json()")
    return data


@lru_cache(maxsize=64)
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_object(kind: type[T], data: Any, where: str) -> T:
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} is {data!r:.60}: expected an object")
    by_name = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(by_name))
    if unknown:
        raise PlanError(
            f"{where} has the unknown field {unknown[0]!r}: remove it, or save again with to_json()"
        )
    arguments = {}
    hints = _hints(cast("Any", kind))
    for name, field in by_name.items():
        if name in data:
            arguments[name] = _decode(hints[name], data[name], f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise PlanError(f"{where} misses the field {name!r}: save it again with to_json()")
    return kind(**arguments)


def _hints_of_items(hints: tuple[Any, ...], count: int, where: str) -> Sequence[Any]:
    """One for each item of a list that is a frozenset, a tuple of any length or one of a fixed length."""
    if len(hints) == 1 or hints[-1] is Ellipsis:
        return (hints[0],) * count
    if len(hints) != count:
        raise PlanError(f"{where} is a list of {count}: give {len(hints)} values, or save it again")
    return hints


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        if value is None:
            if NoneType in get_args(hint):
                return None
        else:
            (hint,) = (option for option in get_args(hint) if option is not NoneType)
            return _decode(hint, value, where)
    elif origin in (tuple, frozenset):
        if isinstance(value, list):
            hints = _hints_of_items(get_args(hint), len(value), where)
            items = enumerate(zip(hints, value, strict=True))
            return origin(_decode(own, item, f"{where}[{index}]") for index, (own, item) in items)
    elif hasattr(hint, "parse"):
        if isinstance(value, str):
            return hint.parse(value)
    elif is_dataclass(hint):
        return _decode_object(hint, value, where)  # type: ignore[arg-type]
    elif hint is float:
        if value == "inf":
            return math.inf
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        ):
            return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise PlanError(f"{where} is {value!r:.60}: give {_WORDS.get(origin or hint, 'text')}, or save it again")
