"""The tree of errors: drawn as it is, catchable as expected, and able to travel between processes."""

from __future__ import annotations

import builtins
import pickle
import re

import pytest

from partita import errors

WARNINGS = ["NotProven"]
NAMES = [name for name in errors.__all__ if name not in ("PartitaError", *WARNINGS)]


def test_the_picture_shows_every_error_and_its_built_in() -> None:
    assert errors.__doc__ is not None
    drawn = dict(re.findall(r"[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__))
    assert set(drawn) == set(NAMES)
    for name, builtin in drawn.items():
        if builtin:
            assert issubclass(getattr(errors, name), getattr(builtins, builtin)), name


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_stands_below_the_picture(name: str) -> None:
    assert issubclass(getattr(errors, name), UserWarning)
    assert f"\n    {name} (UserWarning) " in str(errors.__doc__)


@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_a_partita_error_and_a_built_in(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.PartitaError)
    assert any(
        base.__module__ == "builtins" and base not in (object, Exception, BaseException)
        for base in error.__mro__
    )


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerFailed("rank 1 failed", 1, "Traceback ..."),
        errors.OrderConflict("a cycle", ["a", "b"]),
        errors.PlanError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: errors.PartitaError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
