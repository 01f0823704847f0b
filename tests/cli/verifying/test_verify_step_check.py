"""The step that ``partita verify`` compares, and the batch that it makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partita.cli.models.user_file import Built
from partita.cli.verifying.verify_step_check import compare_step, example_batch, step_schedule
from partita.pipelining import pipeline


class Picky(nn.Module):
    """Takes the integers of its example only."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if int(ids.min()) != 1 or int(ids.max()) != 2:
            raise ValueError("other integers")
        return x * mask


def test_a_batch_has_the_example_first_and_samples_like_it_behind() -> None:
    x, ids, mask = torch.randn(2, 3), torch.tensor([[1, 1], [2, 2]]), torch.ones(1, 3)
    (whole, integers, same), _ = example_batch(Built(Picky(), (x, ids, mask)), 3)
    assert (whole.shape, integers.shape) == ((6, 3), (6, 2))
    assert torch.equal(whole[:2], x)
    assert not torch.equal(whole[2:4], whole[4:])
    assert all({1, 2} == set(part.unique().tolist()) for part in integers.chunk(3))
    assert same is mask


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBH1", "DualPipeV"])
def test_a_step_is_equal_and_one_of_another_model_is_not(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(8)))
    built = Built(model, (torch.randn(2, 8),))
    pipe = pipeline(model, built.args, stages=4)
    check = compare_step(pipe, built, step_schedule(name, 4, 4))
    assert check.equal, check.text
    assert name in check.name
    other = Built(
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(8))), built.args
    )
    check = compare_step(pipe, other, step_schedule(name, 4, 4))
    assert not check.equal
    assert "the stages are not in the state of the uncut model" in check.differences[0].message
