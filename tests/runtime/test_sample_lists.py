"""Lists that may have an entry for each sample are not cut by a guess."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from partita.errors import MicrobatchError
from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, pipeline
from partita.runtime import Comm, InProcessWorld, Reduce, Replicate, TensorChunkSpec, split_args, split_tree
from partita.runtime.sample_lists import check_lists


@pytest.mark.parametrize(
    "entries",
    [
        [torch.zeros(1, 2)]
        * 4,  # the rows of each are broadcast: a microbatch would get those of all samples
        [torch.zeros(4, 2)] * 4,  # as many boxes in each as there are samples: a few of each
        ({"boxes": torch.zeros(1, 4)},) * 4,
        ["a", "b", "c", "d"],
    ],
)
def test_a_list_with_as_many_entries_as_samples_is_refused_until_a_spec_says_what_it_is(entries: Any) -> None:
    x = torch.zeros(4, 3)
    for args, kwargs in (
        ((x, entries), {}),
        ((x,), {"entries": entries}),
        ((), {"x": x, "in": {"e": entries}}),
    ):
        with pytest.raises(
            MicrobatchError, match=r"is a (list|tuple) of 4, and the batch has 4 samples.*_mbs"
        ):
            split_args(args, kwargs, 2)
    assert len(split_args((x, entries), None, 2, (None, Replicate()))[0][0][1]) == 4
    split_args((x,), {"entries": entries}, 1)  # nothing is cut
    split_args((torch.zeros(6, 3), torch.zeros(6)), {"entries": [torch.zeros(6)] * 4}, 2)


def test_a_spec_may_stand_for_each_entry_and_nothing_is_said_of_entries_of_none() -> None:
    x = torch.zeros(2, 3)
    (_, first), _ = split_args((x,), {"pair": (x, x)}, 2, None, {"pair": (TensorChunkSpec(0), Replicate())})
    assert [value.shape[0] for value in first["pair"]] == [1, 2]
    split_args((x,), {"cache": [None, None]}, 2)
    assert split_tree([x, x], 2)[1].sizes == (1, 1)


def test_states_that_have_the_batch_and_settings_are_no_lists_of_samples() -> None:
    x = torch.zeros(2, 3)
    (_, kwargs), _ = split_args((x,), {"states": (x, x), "size": (224, 224)}, 2)
    assert [value.shape[0] for value in kwargs["states"]] == [1, 1]
    assert kwargs["size"] == (224, 224)
    for entries in ((x, torch.zeros(1, 3)), [x, x]):
        with pytest.raises(MicrobatchError, match="if it has an entry for each"):
            split_args((x,), {"entries": entries}, 2)


def test_targets_have_no_specs() -> None:
    with pytest.raises(MicrobatchError, match=r"target\['boxes'\] is a list of 3.*give a dict of them"):
        check_lists({"boxes": [torch.zeros(1)] * 3}, "target", 3, specified=False)


class _Detector(nn.Module):
    """Compares each sample with an entry of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, entries: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": _beside(self.b(self.a(x)), entries)}


def _beside(output: Tensor, entries: list[Tensor]) -> Tensor:
    pairs = zip(output, entries, strict=False)
    return torch.stack([(one - other).square().mean() for one, other in pairs]).mean()


def test_predictions_are_not_compared_with_the_entries_of_other_samples() -> None:
    """Each microbatch got the entries of all samples, and ``zip`` took the first ones: another loss."""
    model = _Detector()
    x, entries = torch.randn(4, 4), [torch.randn(1, 4) for _ in range(4)]
    at_b = {"b": SplitPoint.BEGINNING}
    pipe = pipeline(model, (x[:2], entries[:2]), split_spec=at_b, frontend="modules")
    parts = [(x[:2], entries[:2]), (x[2:], entries[2:])]

    def train(comm: Comm) -> list[Tensor]:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 2)
        losses: list[Tensor] = []
        schedule.step(arg_mbs=parts, losses=losses)
        return losses

    def whole(comm: Comm) -> None:
        Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 2).step(x, entries)

    with pytest.raises(MicrobatchError, match=r"args\[1\] is a list of 4, and the batch has 4 samples"):
        InProcessWorld(2).run(whole)
    with pytest.raises(MicrobatchError, match=r"args\[1\] is a list of 4, and the batch has 4 samples"):
        UncutReference(model, 2).step(x, entries)
    losses = InProcessWorld(2).run(train)[-1]
    assert torch.equal(torch.stack(losses), torch.stack([model(*part)["loss"].detach() for part in parts]))


def test_outputs_are_not_compared_with_targets_of_other_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, target = torch.randn(4, 4), [torch.randn(2, 4) for _ in range(4)]
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.BEGINNING})

    def train(comm: Comm) -> list[Tensor]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, cast(Any, _beside))
        losses: list[Tensor] = []
        schedule.step(x, target_mbs=[target[:2], target[2:]], losses=losses)
        return losses

    losses = InProcessWorld(2).run(train)[-1]
    expected = [_beside(model(x[:2]), target[:2]), _beside(model(x[2:]), target[2:])]
    assert torch.equal(torch.stack(losses), torch.stack(expected).detach())

    def wrong(comm: Comm) -> None:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        Schedule1F1B(stage, 2, cast(Any, _beside)).step(x, target=target)

    with pytest.raises(MicrobatchError, match="target is a list of 4, and the batch has 4 samples"):
        InProcessWorld(2).run(wrong)


@pytest.mark.parametrize("rows", [(3, 3), (2, 1), (1, 3)])
def test_microbatches_count_by_their_samples_and_not_by_rows_of_lists(rows: tuple[int, int]) -> None:
    """Three boxes in each picture of one microbatch and one in each of the other: the first counted three
    times as much.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    targets = [[torch.randn(number, 4) for _ in range(2)] for number in rows]
    parts = [x[:2], x[2:]]
    entered = _Detector()
    for module, step in (
        (model, {"arg_mbs": [(part,) for part in parts], "target_mbs": targets}),
        (model, {"target_mbs": targets}),
        (entered, {"kwarg_mbs": [{"x": a, "entries": b} for a, b in zip(parts, targets, strict=True)]}),
    ):
        pipe = pipeline(
            module,
            (x[:2], targets[0]) if module is entered else (x[:2],),
            split_spec={"b" if module is entered else "1": SplitPoint.BEGINNING},
            frontend="modules",
        )

        def train(comm: Comm, pipe: Any = pipe, module: nn.Module = module, step: Any = step) -> Any:
            stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
            schedule = Schedule1F1B(stage, 2, None if module is entered else cast(Any, _beside))
            schedule.step(*([] if len(step) == 2 or module is entered else [x]), **step)
            return [parameter.grad for parameter in stage.module.parameters()]

        gradients = [gradient for rank in InProcessWorld(2).run(train) for gradient in rank]
        whole = copy.deepcopy(module)
        for part, target in zip(parts, targets, strict=True):
            loss = whole(part, target)["loss"] if module is entered else _beside(whole(part), target)
            (loss / 2).backward()
        for gradient, parameter in zip(gradients, whole.parameters(), strict=True):
            assert torch.equal(gradient, cast(Tensor, parameter.grad))


class Detects(nn.Module):
    """Returns a dict for each sample, as the detectors of torchvision do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        rows = self.head(self.body(x).relu())
        return [{"boxes": row[:4].unflatten(0, (1, 4)), "scores": row[4:]} for row in rows]


def test_outputs_of_samples_are_not_joined_with_those_of_others() -> None:
    """Of four pictures two came back, each with the boxes of two."""
    model, x = Detects(), torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"head": SplitPoint.BEGINNING})
    apart = Reduce(lambda parts, value: [*parts, value], [])

    def evaluate(comm: Comm, spec: Any) -> Any:
        return Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 2, output_merge_spec=spec).eval(x)

    with pytest.raises(
        MicrobatchError, match=r"a list of 2 dicts \(of 'boxes', 'scores'\).*output_merge_spec"
    ):
        InProcessWorld(2).run(partial(evaluate, spec=None))
    *_, joined = InProcessWorld(2).run(partial(evaluate, spec=TensorChunkSpec(0)))
    assert [entry["boxes"].shape for entry in joined] == [(2, 4), (2, 4)]
    *_, output = InProcessWorld(2).run(partial(evaluate, spec=apart))
    for microbatch, part in enumerate(x.split(2)):
        for sample, expected in enumerate(model(part)):
            assert torch.equal(output[sample]["boxes"][microbatch], expected["boxes"])


def test_a_list_is_refused_where_only_its_own_tensors_could_say_how_many_samples_there_are() -> None:
    """Each microbatch got all sequences, and half of each."""
    sequences = [torch.arange(6.0)] * 4
    for args, kwargs in (((sequences,), {}), ((), {"x": sequences}), ((1, {"x": sequences}), {})):
        with pytest.raises(MicrobatchError, match=r"is a list of 4, and nothing outside of lists .*arg_mbs"):
            split_args(args, kwargs, 2)
    split_args((sequences,), None, 1)  # nothing is cut
    for said in (TensorChunkSpec(0), [TensorChunkSpec(0)] * 4):
        (part,), _ = split_args((sequences,), None, 2, (said,))[1]
        assert [row.tolist() for row in part] == [[3.0, 4.0, 5.0]] * 4
    states = (torch.zeros(6, 2), torch.zeros(6, 2))
    assert len(split_args((states,), None, 2)[0][0][0][0]) == 3
