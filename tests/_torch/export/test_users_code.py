from __future__ import annotations

import random

import mpmath  # type: ignore[import-untyped]
import pytest
import sympy  # type: ignore[import-untyped]
import torch

import partita
from partita._torch.export.users_code import is_users


def test_installed_libraries_are_the_users_and_torch_partita_and_python_are_not() -> None:
    assert is_users(__file__)
    assert is_users(pytest.__file__)  # as libraries of models are
    for module in (torch, sympy, mpmath, random, partita):
        assert not is_users(module.__file__)
    assert not is_users("<eval_with_key>.1")
