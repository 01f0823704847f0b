"""Loops that take turns at one generator draw what they would draw alone."""

from __future__ import annotations

import torch

from partita.integrations.generation.draws import GlobalDraws, SeededDraws, SharedDraws

ROWS, WORDS, STEPS = 5, 11, 4


def _steps() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(ROWS, WORDS, generator=generator).softmax(-1) for _ in range(STEPS)]


def _whole(seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    return [GlobalDraws().draw(step).tolist() for step in _steps()]


def test_parts_of_a_batch_draw_what_the_whole_batch_draws() -> None:
    expected = _whole(1)
    after = torch.rand(1)
    torch.manual_seed(1)
    states: list[torch.Tensor] = []
    parts = [SharedDraws(slice(0, 2), ROWS, states), SharedDraws(slice(2, ROWS), ROWS, states)]
    drawn = []
    for number, step in enumerate(_steps()):
        order = (0, 1) if number % 2 else (1, 0)
        tokens = {part: parts[part].draw(step[0:2] if part == 0 else step[2:ROWS]) for part in order}
        drawn.append([*tokens[0].tolist(), *tokens[1].tolist()])
    assert drawn == expected
    assert torch.equal(torch.rand(1), after)


def test_a_part_that_ends_early_does_not_change_the_others() -> None:
    expected = _whole(1)
    torch.manual_seed(1)
    states: list[torch.Tensor] = []
    short, long = SharedDraws(slice(0, 2), ROWS, states), SharedDraws(slice(2, ROWS), ROWS, states)
    for number, step in enumerate(_steps()):
        if number < 2:
            assert short.draw(step[0:2]).tolist() == expected[number][0:2]
        assert long.draw(step[2:ROWS]).tolist() == expected[number][2:ROWS]


def test_seeds_give_streams_of_their_own_and_leave_the_generator() -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    one, other = SeededDraws(1), SeededDraws(2)
    drawn: tuple[list[list[int]], list[list[int]]] = ([], [])
    for step in _steps():
        drawn[0].append(one.draw(step).tolist())
        drawn[1].append(other.draw(step).tolist())
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn == (_whole(1), _whole(2))
