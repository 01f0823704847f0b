"""Lists in arguments: the example that a model was cut with says whether they are lists of samples."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from partita.errors import MicrobatchError
from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, pipeline, verify_step
from partita.runtime import Comm, InProcessWorld
from partita.runtime.example_arguments import ExampleArguments


class Views(nn.Module):
    """Takes a list of views of each sample, and returns a dict for each view."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, views: list[Tensor]) -> list[dict[str, Tensor]]:
        joined = self.head(self.body(torch.cat(views)).relu())
        return [{"logits": part} for part in joined.chunk(len(views))]


def mean_loss(output: list[dict[str, Tensor]], target: Tensor) -> Tensor:
    return sum(((one["logits"] - target) ** 2).mean() for one in output)  # type: ignore[return-value]


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_list_of_values_that_each_have_the_whole_batch_is_cut_as_the_example_is(
    frontend: Literal["export", "modules"],
) -> None:
    """Both were refused: the list that a step was given, and the one that the model returned."""
    model, target = Views(), torch.randn(4, 4)
    views = [torch.randn(4, 4) for _ in range(3)]
    pipe = pipeline(
        model, ([view[:2] for view in views],), split_spec={"head": SplitPoint.BEGINNING}, frontend=frontend
    )

    def train(comm: Comm) -> Any:
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 2, mean_loss)
        reference = UncutReference(copy.deepcopy(model), 2, mean_loss, example=pipe.example)
        verify_step(schedule, reference, views, target=target)
        return schedule.eval(views)

    *_, outputs = InProcessWorld(2).run(train)
    for output, expected in zip(outputs, model(views), strict=True):
        assert torch.equal(output["logits"], expected["logits"])


def test_in_code_a_list_of_samples_is_refused_where_it_may_be_one() -> None:
    rows = [torch.randn(4, 4) for _ in range(3)]
    pipe = pipeline(Views(), (rows,), split_spec={"head": SplitPoint.BEGINNING}, frontend="modules")

    def evaluate(comm: Comm) -> Any:
        return Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 2).eval(rows)

    with pytest.raises(MicrobatchError, match="is a list of 3, and nothing outside of lists"):
        InProcessWorld(2).run(evaluate)


def test_a_graph_takes_lists_of_the_examples_lengths_only() -> None:
    model, views = Views(), [torch.randn(2, 4)] * 3
    pipe = pipeline(model, (views,), split_spec={"head": SplitPoint.BEGINNING})
    example = pickle.loads(pickle.dumps(pipe.info().example))
    assert example.samples == 2
    assert example.has_lists_of(([torch.randn(6, 4)] * 3,), {})
    assert example.has_lists_of((), {"views": views})
    assert not example.has_lists_of((views[:2],), {})


def test_samples_are_counted_outside_of_lists_where_tensors_are() -> None:
    x, rows = torch.zeros(2, 3), [torch.zeros(5, 3)] * 2
    assert ExampleArguments.of((x, rows), {"mask": torch.zeros(1, 3)}).samples == 2
    assert ExampleArguments.of((rows,), None).samples == 5
    assert ExampleArguments.of(([x, *rows],), {}).samples is None
