"""Functions run as they were written while any thread asks for it, and can be stopped before they run."""

from __future__ import annotations

import pytest
import torch

from partita._torch.compile.eager_stance import nothing_compiled, when_traced


def compiles() -> bool:
    """Whether a function is compiled now."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return bool(graphs)


def test_nothing_compiles_within_the_block() -> None:
    with nothing_compiled():
        assert not compiles()
        with nothing_compiled():
            pass
        assert not compiles()
    assert compiles()


def test_one_that_comes_second_and_leaves_last_does_not_leave_the_compiler_off() -> None:
    first, second = nothing_compiled(), nothing_compiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not compiles()
    second.__exit__(None, None, None)
    assert compiles()


def test_an_error_turns_the_compiler_on_again() -> None:
    with pytest.raises(ValueError, match="inside"), nothing_compiled():
        raise ValueError("inside")
    assert compiles()


class Stopped(BaseException):
    pass


def test_a_traced_function_can_be_stopped_before_it_does_anything_to_objects() -> None:
    seen: list[int] = []

    def notes(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x

    def stop() -> None:
        raise Stopped

    run = torch.compile(notes, backend="eager", fullgraph=True)
    with pytest.raises(Stopped), when_traced(stop):
        run(torch.ones(2))
    assert not seen
    run(torch.ones(2))
    assert seen == [2]
