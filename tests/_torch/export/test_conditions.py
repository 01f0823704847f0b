from __future__ import annotations

import torch
from torch import Tensor, nn

from partita._torch.export.conditions import Answers, answers_given, condition_nodes
from partita._torch.export.export import export_module


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 0).all():
            return x * 2
        if x.sum() > 0:
            return x * 3
        return x * 4


def test_a_trace_is_told_what_was_planned_and_keeps_what_was_asked() -> None:
    for planned, factor in (((True,), 2), ((False, True), 3), ((), 4)):
        answers = Answers(planned)
        module = export_module(Asks(), (torch.ones(2, 3),), {}, way="eager", answers=answers)
        asked = condition_nodes(module)
        assert len(asked) == len(answers.in_order) == max(len(planned), 1 if factor == 2 else 2)
        assert all("test_conditions.py" in place for place in answers.places)
        products = [node.args[1] for node in module.graph.nodes if node.name.startswith("mul")]
        assert products == [factor]


def test_what_a_run_hears_is_noted_by_line() -> None:
    answers = Answers()
    with answers_given(answers):
        assert torch.equal(Asks()(torch.tensor([1.0, -0.5])), torch.tensor([3.0, -1.5]))
    assert list(answers.by_place.values()) == [[False], [True]]
    again = Answers(example=answers.by_place)
    assert [again.answer(place) for place in answers.places] == [False, True]
    assert not again.differ_from({**answers.by_place, "asked.py by the example only": [True]})
    first, second = answers.by_place
    assert again.differ_from({first: [True], second: [True]})
    assert again.differ_from({first: [False]})
    again.forget()
    assert not again.in_order


def test_two_draws_are_two_questions() -> None:
    """Both were taken for one, and the second was neither asked nor checked."""

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                if torch.rand([]) < 0.5:
                    x = x * 2
            return x

    answers = Answers((True, False))
    module = export_module(Draws(), (torch.ones(2, 3),), {}, way="eager", answers=answers)
    assert answers.in_order == [True, False]
    assert len(condition_nodes(module)) == 2
