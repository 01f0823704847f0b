from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from partita._torch.export.conditions import Answers, condition_nodes
from partita._torch.export.export import export_module


class Asks(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        if self.kind == "written":
            positions = positions.clone()
            positions[0].fill_(7)
        if self.kind == "random":
            positions = torch.rand(x.shape[0], x.shape[1]).cumsum(-1)
        if self.kind == "of data":
            positions = positions + x.long()
        limit = 2 * x.shape[1] if self.kind == "of the batch" else 99
        consecutive = (positions.diff(dim=-1) == 1).all() & (positions[:, 1].sum() < limit)
        return x + 1 if consecutive else x * 2


@pytest.mark.parametrize(
    ("kind", "is_constant"),
    [("constant", True), ("written", False), ("random", False), ("of data", False)],
)
def test_a_question_about_constants_and_sizes_is_answered_at_once(kind: str, is_constant: bool) -> None:
    x = torch.zeros(3, 4)
    for shapes in (None, {"x": {0: Dim.AUTO}}):
        answers = Answers()
        module = export_module(Asks(kind), (x,), {}, way="eager", dynamic_shapes=shapes, answers=answers)
        assert len(condition_nodes(module)) == 1
        assert (answers.in_order, answers.of_sizes) == ([is_constant], {0} if is_constant else set())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_without_elements_is_a_constant_and_questions_are_answered_on_meta_too(device: str) -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            length = x.shape[1]
            if (~mask[:, length:]).all() and (torch.arange(length, device=device).diff() == 1).all():
                return x + 1
            return x * 2

    args = (torch.zeros(3, 4, device=device), torch.ones(3, 4, dtype=torch.bool, device=device))
    for shapes in (None, {"x": {0: Dim.AUTO}, "mask": {0: Dim.AUTO}}):
        answers = Answers()
        export_module(Empty(), args, {}, way="eager", dynamic_shapes=shapes, answers=answers)
        assert (answers.in_order, answers.of_sizes) == ([True, True], {0, 1})


def test_an_answer_that_is_another_one_for_another_batch_is_not_taken() -> None:
    for batch in (7, 3, 1):  # the next larger than 7 is 8, 3 * 16 is above 8 too, and so is 16
        answers = Answers()
        shapes = {"x": {0: Dim.AUTO}}
        args = (torch.zeros(batch, 4),)
        export_module(Asks("of the batch"), args, {}, way="eager", dynamic_shapes=shapes, answers=answers)
        assert not answers.of_sizes
