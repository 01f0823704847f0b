from __future__ import annotations

import pytest
import torch
from tests.pipelining.models import CALLED, TRANSFORMER
from torch import Tensor, nn

from partita.capture import capture
from partita.errors import InfeasiblePlan
from partita.pipelining import SplitPoint, pipe_split
from partita.pipelining.cuts import cuts_at_marks, cuts_at_points, stage_assignment


def _graph(model: nn.Module, *args: Tensor) -> torch.fx.GraphModule:
    return capture(model, args).module


def _after(gm: torch.fx.GraphModule, cuts: list[int]) -> list[str]:
    nodes = list(gm.graph.nodes)
    return [nodes[cut].name for cut in cuts]


def test_a_point_may_be_a_container_and_covers_all_that_is_in_it() -> None:
    model = TRANSFORMER.model()
    gm = _graph(model, *TRANSFORMER.data(2)[0])
    begin = cuts_at_points(gm, model, {"blocks.1": SplitPoint.BEGINNING})
    end = cuts_at_points(gm, model, {"blocks.0": SplitPoint.END})
    assert begin == end
    assert cuts_at_points(gm, model, {"blocks.0.feed": SplitPoint.END})[0] < end[0]


def test_a_module_that_is_called_twice_begins_at_its_first_call_and_ends_at_its_last() -> None:
    model = CALLED.model()
    gm = _graph(model, *CALLED.data(2)[0])
    assert _after(gm, cuts_at_points(gm, model, {"a": SplitPoint.END})) == ["linear_3"]
    assert _after(gm, cuts_at_points(gm, model, {"b": SplitPoint.BEGINNING})) == ["linear"]


def test_marks_are_taken_out_of_the_graph() -> None:
    class Marked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            pipe_split()
            x = x.cos()
            pipe_split()
            return x.neg()

    gm = _graph(Marked(), torch.ones(2))
    assert _after(gm, cuts_at_marks(gm)) == ["sin", "cos"]
    assert cuts_at_marks(gm) == []
    assert torch.equal(gm(torch.ones(2)), Marked()(torch.ones(2)))


def test_each_cut_starts_a_stage_and_inputs_belong_to_none() -> None:
    gm = _graph(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh()), torch.ones(2))
    positions = {node.name: position for position, node in enumerate(gm.graph.nodes)}
    cuts = [positions["relu"], positions["sigmoid"], positions["relu"]]
    assert stage_assignment(gm, cuts) == {"relu": 0, "sigmoid": 1, "tanh": 2}


def test_a_cut_with_nothing_behind_it_is_refused() -> None:
    gm = _graph(nn.ReLU(), torch.ones(2))
    with pytest.raises(
        InfeasiblePlan, match="stage 1 would have nothing to compute: two cuts fall on one place"
    ):
        stage_assignment(gm, [len(gm.graph.nodes)])
