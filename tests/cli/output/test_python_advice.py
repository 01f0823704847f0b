from __future__ import annotations

import pytest

from partita.cli.output.python_advice import python_advice


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("give 2 stages", ""),
        ("--frontend=modules", ""),
        (
            'Or cut the model at its blocks: frontend="modules"',
            "frontend= is an argument of partita.pipelining.pipeline(), in Python: no option of a command",
        ),
        (
            "give split_spec= or frontend=",
            "frontend= and split_spec= are arguments of partita.pipelining.pipeline(), in Python: --split-at "
            "stands for split_spec= in partita split",
        ),
    ],
)
def test_arguments_that_no_command_has_are_said_to_be_pythons(message: str, advice: str) -> None:
    assert python_advice(message) == advice
