from __future__ import annotations

import pytest
import torch
from tests.pipelining.models import CALLED, TRANSFORMER
from torch import Tensor, nn

from partita.capture import capture
from partita.errors import AssignmentError
from partita.pipelining import SplitPoint, pipe_split, pipeline
from partita.pipelining.frontends.cuts.cuts import Place, cuts_at_marks, cuts_at_points, stage_assignment


def _graph(model: nn.Module, *args: Tensor) -> torch.fx.GraphModule:
    return capture(model, args).module


def _after(gm: torch.fx.GraphModule, cuts: list[int]) -> list[str]:
    nodes = list(gm.graph.nodes)
    return [nodes[cut].name for cut in cuts]


def test_a_point_may_be_a_container_and_covers_all_that_is_in_it() -> None:
    model = TRANSFORMER.model()
    gm = _graph(model, *TRANSFORMER.data(2)[0])
    begin = cuts_at_points(gm, {"blocks.1": SplitPoint.BEGINNING})
    end = cuts_at_points(gm, {"blocks.0": SplitPoint.END})
    assert begin == end
    assert cuts_at_points(gm, {"blocks.0.feed": SplitPoint.END})[0] < end[0]


@pytest.mark.parametrize(
    ("place", "point", "after"),
    [
        ("a@0", SplitPoint.END, "linear"),
        (("a", 1), SplitPoint.END, "linear_3"),
        ("a@1", SplitPoint.BEGINNING, "linear_2"),
        ("b", SplitPoint.BEGINNING, "linear"),
        ("b@0", SplitPoint.BEGINNING, "linear"),
    ],
)
def test_a_module_that_is_called_twice_is_cut_at_the_call_that_is_meant(
    place: Place, point: SplitPoint, after: str
) -> None:
    model = CALLED.model()
    gm = _graph(model, *CALLED.data(2)[0])
    assert _after(gm, cuts_at_points(gm, {place: point})) == [after]


def test_a_name_that_may_be_any_of_several_calls_is_refused_with_a_list_of_them() -> None:
    model = CALLED.model()
    gm = _graph(model, *CALLED.data(2)[0])
    listed = r"'a' is called 2 times: 'a@0' \(linear to linear\), 'a@1' \(linear_3 to linear_3\)"
    with pytest.raises(AssignmentError, match=listed + "; say which of them is meant"):
        cuts_at_points(gm, {"a": SplitPoint.END})
    with pytest.raises(AssignmentError, match=listed + "; say one of them, there is no a@2"):
        cuts_at_points(gm, {"a@2": SplitPoint.END})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


class Shared(nn.Module):
    """One block three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)))


def test_calls_of_shared_and_nested_modules_are_counted_for_each_name() -> None:
    model, x = Shared(), torch.randn(3, 4)
    pipe = pipeline(model, (x,), split_spec={"a@1": SplitPoint.BEGINNING, "b": SplitPoint.BEGINNING})
    assert pipe.num_stages == 3
    assert torch.equal(pipe(x), model(x))
    gm = _graph(model, x)
    assert _after(gm, cuts_at_points(gm, {("a.inner", 1): SplitPoint.END})) == ["linear_1"]


def test_both_names_of_a_shared_module_are_known_where_arguments_have_no_names_of_their_own() -> None:
    class Catching(Shared):
        def forward(self, **arguments: Tensor) -> Tensor:
            return super().forward(arguments["x"])

    model, x = Catching(), torch.randn(3, 4)
    pipe = pipeline(model, (), {"x": x}, split_spec={"b": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    assert torch.equal(pipe(x=x), model(x=x))


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


def test_a_cut_with_nothing_before_or_behind_it_is_none() -> None:
    gm = _graph(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.ones(2))
    cuts = [-1, 0, len(gm.graph.nodes)]
    assert set(stage_assignment(gm, cuts).values()) == {0}


def test_switches_of_a_region_are_nothing_to_compute() -> None:
    class Region(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            pipe_split()
            with torch.no_grad():
                pipe_split()
                x = x.cos()
            pipe_split()
            return x.neg()

    gm = _graph(Region(), torch.ones(2))
    assignment = stage_assignment(gm, cuts_at_marks(gm))
    assert (assignment["sin"], assignment["cos"], assignment["neg"]) == (0, 1, 2)


def test_what_is_no_split_point_is_refused_with_those_that_there_are() -> None:
    for frontend in ("export", "modules"):
        with pytest.raises(AssignmentError, match=r"'middle': give SplitPoint\.BEGINNING or"):
            pipeline(
                nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
                (torch.randn(1, 2),),
                split_spec={"1": "middle"},  # type: ignore[dict-item]
                frontend=frontend,  # type: ignore[arg-type]
            )
