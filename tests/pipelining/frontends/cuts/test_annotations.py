from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.pipelining.models import CALLED, PLAIN, TRANSFORMER, WIDTH
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.distributed import pipelining as theirs

from partita.errors import AssignmentError
from partita.pipelining import Pipe, PipeSequential, SplitPoint, annotate_split_points, pipe_split, pipeline
from partita.pipelining.frontends.cuts import clear_split_points


def _names(pipe: Pipe) -> list[list[str]]:
    return [list(pipe.get_stage_module(index).state_dict()) for index in range(pipe.num_stages)]


def test_annotated_points_are_where_the_model_is_cut() -> None:
    model, (args, _, _) = TRANSFORMER.model(), TRANSFORMER.data(2)
    spec = {"blocks.0": SplitPoint.BEGINNING, "blocks.1.feed": SplitPoint.END}
    expected = pipeline(model, args, split_spec=spec)
    annotate_split_points(model, spec)
    assert _names(pipeline(model, args)) == _names(expected)


def test_an_annotated_model_is_as_it_was_and_can_be_cut_again_with_and_without() -> None:
    model, (args, _, _) = PLAIN.model(), PLAIN.data(2)
    output, forward = model(*args), model.a.forward
    annotate_split_points(model, {"a": SplitPoint.END})
    assert model.a.forward == forward
    assert_equal(model(*args), output)
    assert pipeline(model, args).num_stages == pipeline(model, args).num_stages == 2
    with pytest.raises(ValueError, match=r"annotated with split points at 'a' and pipeline got stages: use"):
        pipeline(model, args, stages=3)
    clear_split_points(model)
    assert pipeline(model, args, stages=3).num_stages == 3
    with pytest.raises(ValueError, match="does not know where to cut"):
        pipeline(model, args)


def test_annotating_again_adds_to_what_is_there_and_the_same_point_counts_once() -> None:
    model, (args, _, _) = PLAIN.model(), PLAIN.data(2)
    annotate_split_points(model, {"b": SplitPoint.BEGINNING})
    annotate_split_points(model, {"b": SplitPoint.BEGINNING})
    assert pipeline(model, args).num_stages == 2
    annotate_split_points(model, {"b": SplitPoint.END})
    annotate_split_points(model, {"d": SplitPoint.BEGINNING})
    assert _names(pipeline(model, args)) == [
        ["a.weight", "a.bias"],
        ["b.weight", "b.bias"],
        ["c.weight", "c.bias"],
        ["d.weight", "d.bias"],
    ]


def test_annotations_survive_copying_pickling_and_standing_inside_another_model() -> None:
    model, (args, _, _) = PLAIN.model(), PLAIN.data(2)
    annotate_split_points(model, {"b": SplitPoint.END})
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), nn.Sequential(model)):
        assert pipeline(other, args).num_stages == 2


def test_an_unknown_path_is_an_attribute_error_that_names_it_and_nothing_is_noted() -> None:
    model, (args, _, _) = PLAIN.model(), PLAIN.data(2)
    with pytest.raises(AttributeError, match=r"split point 'b\.inner': Linear has no submodule 'inner'"):
        annotate_split_points(model, {"a": SplitPoint.END, "b.inner": SplitPoint.END})
    with pytest.raises(ValueError, match=r"the split point of 'a' is 'end': give SplitPoint\.BEGINNING or"):
        annotate_split_points(model, {"a": "end"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="does not know where to cut"):
        pipeline(model, args)


def test_marks_and_annotations_in_one_model_are_refused() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            pipe_split()
            return self.a(x)

    model = Marked()
    annotate_split_points(model, {"a": SplitPoint.BEGINNING})
    with pytest.raises(ValueError, match=r"at 'a' and its forward calls pipe_split\(\): use one of the two"):
        pipeline(model, (torch.ones(2, WIDTH),))


def test_a_module_under_two_names_is_found_under_the_one_that_is_called() -> None:
    model = CALLED.model()
    model.again = model.b
    annotate_split_points(model, {"again": SplitPoint.END})
    assert pipeline(model, CALLED.data(2)[0]).num_stages == 2
    model.spare = nn.Linear(2, 2)
    annotate_split_points(model, {"spare": SplitPoint.END})
    with pytest.raises(AssignmentError, match="no operation of the graph belongs to 'spare'"):
        pipeline(model, CALLED.data(2)[0])


class TheirMark(nn.Module):
    """A model whose author used torch's own mark."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        theirs.pipe_split()
        return self.b(h)


def test_torchs_own_mark_is_understood() -> None:
    pipe = pipeline(TheirMark(), (torch.ones(2, WIDTH),))
    assert _names(pipe) == [["a.weight", "a.bias"], ["b.weight", "b.bias"]]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        ({"0": "BEGINNING"}, 1),
        ({"2": "END"}, 1),
        ({"0": "BEGINNING", "1": "BEGINNING"}, 2),
        ({"0": "END", "1": "BEGINNING", "2": "BEGINNING"}, 3),
    ],
    ids=["before the first", "after the last", "every block's beginning", "side by side"],
)
def test_a_cut_with_nothing_on_one_side_is_none(spec: dict[str, str], stages: int) -> None:
    """There, the stages are counted without the empty one but numbered with it: one of them is missing."""
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)
    if spec != {"2": "END"}:
        points = {path: theirs.SplitPoint[end] for path, end in spec.items()}
        broken = theirs.pipeline(copy.deepcopy(model), (x,), split_spec=points)
        with pytest.raises(AttributeError, match="no attribute 'submod_pp_"):
            [broken.get_stage_module(index) for index in range(broken.num_stages)]
    pipe = pipeline(model, (x,), split_spec={path: SplitPoint[end] for path, end in spec.items()})
    assert pipe.num_stages == stages
    assert torch.equal(pipe(x), model(x))


def test_a_chain_of_stages_from_a_sequential_shares_modules_and_names() -> None:
    layer = nn.Linear(4, 4)
    sequential = nn.Sequential()
    for name, module in {"first": layer, "act": nn.ReLU(), "again": layer, "last": nn.Linear(4, 2)}.items():
        sequential.add_module(name, module)
    chain = PipeSequential.from_sequential(sequential.eval())
    x = torch.randn(2, 4)
    assert chain.state_dict().keys() == sequential.state_dict().keys()
    assert chain.first is chain.again is layer
    assert not chain.training
    assert torch.equal(chain(x), sequential(x))
    pipe = pipeline(chain, (x,))
    assert pipe.num_stages == 4
    assert torch.equal(pipe(x), sequential(x))
    assert len(chain[:2]) == 2
