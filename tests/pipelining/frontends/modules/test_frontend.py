"""Models cut between their own submodules, without capturing them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.own_functions import Dirty
from tests.pipelining.models import WIDTH
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import partita
from partita.errors import AssignmentError, CaptureError, InfeasiblePlan, ModuleNameError
from partita.pipelining import (
    MultiUseParameterConfig,
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    annotate_split_points,
    build_stage,
    pipeline,
)
from partita.runtime import Comm, InProcessWorld

END, BEGINNING = SplitPoint.END, SplitPoint.BEGINNING


class Branching(nn.Module):
    """Which way it goes depends on the data, and it counts the ways: nothing that could be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.ways = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), [0, 0]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        way = int(x.sum() > 0)
        self.ways[way] += 1
        h = self.norm(self.lin(x))
        for _ in range(int(x.abs().max().item()) % 3):
            h = h.tanh()
        return h + x if way else h if scale is None else h * scale


class Looping(nn.Module):
    """A loop over a ModuleList with a skip over stages, an input that later blocks use, and a tied weight."""

    def __init__(self, block: Callable[[], nn.Module] = Branching) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, factor: Tensor, power: int = 1, *, skip: bool = True) -> dict[str, Any]:
        h = first = self.embed(x) * self.scale
        for block in self.blocks:
            h = block(h, factor)
        if skip:
            h = h + first
        return {"out": self.head(h) ** power, "power": power}


def _model(make: Callable[[], nn.Module] = Looping) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _data(samples: int, seed: int = 1) -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(seed)
    return (torch.randn(samples, WIDTH), torch.rand(samples, 1)), torch.randn(samples, WIDTH)


def _loss(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(output["out"] if isinstance(output, dict) else output, target)


SPEC = {"blocks.0": END, "blocks.2": BEGINNING, "head": BEGINNING}


def _cut(model: nn.Module, spec: Any = SPEC, args: Any = None, **options: Any) -> Pipe:
    return pipeline(model, args or _data(2)[0], split_spec=spec, frontend="modules", **options)


def _whole(model: nn.Module, steps: tuple[int, ...]) -> list[Any]:
    seen: list[Any] = []
    for number, samples in enumerate(steps):
        args, target = _data(samples, number)
        outputs = []
        for part in range(4):
            microbatch = [value.tensor_split(4)[part] for value in (*args, target)]
            outputs.append(model(*microbatch[:2])["out"])
            torch.autograd.backward(
                _loss(outputs[-1], microbatch[2]), torch.tensor(len(microbatch[0]) / samples)
            )
        seen += [
            torch.cat(outputs).detach(),
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        ]
    return [*seen, dict(model.state_dict())]


@pytest.mark.parametrize(
    ("ranks", "kind"), [pytest.param(4, ScheduleGPipe, marks=pytest.mark.dear), (2, Schedule1F1B)]
)
def test_a_model_that_can_not_be_captured_trains_bit_for_bit_like_the_whole(kind: Any, ranks: int) -> None:
    steps = (8, 8, 12)
    with pytest.raises(CaptureError):
        pipeline(_model(), _data(2)[0], split_spec=SPEC)
    expected = _whole(_model(), steps)

    def body(comm: Comm) -> list[Any]:
        pipe = _cut(_model())
        own = [index for index in range(4) if index % ranks == comm.rank]
        stages = [pipe.build_stage(index, comm=comm) for index in own]
        schedule, seen = kind(stages, 4, _loss), []
        for number, samples in enumerate(steps):
            args, target = _data(samples, number)
            output = schedule.step(*args, target=target)
            gradients = {
                name: parameter.grad.clone()
                for stage in stages
                for name, parameter in stage.module.named_parameters(remove_duplicate=False)
                if parameter.grad is not None
            }
            seen += [output and output["out"], gradients]
        return [*seen, {k: v for stage in stages for k, v in stage.module.state_dict().items()}]

    results = InProcessWorld(ranks).run(body)
    for place, value in enumerate(expected):
        if isinstance(value, Tensor):
            assert_equal(results[-1][place], value)
            continue
        names = set().union(*(seen[place] for seen in results))
        assert names >= value.keys()
        for seen in results:
            for name, tensor in seen[place].items():
                wanted = value.get(name, value.get("embed.weight"))  # the tied one has two names
                assert_equal(tensor, wanted, f"{place}: {name}")


def test_the_model_is_not_changed_and_stages_hold_its_own_parameters() -> None:
    model = _model()
    before, hooks = copy.deepcopy(model.state_dict()), model.forward
    pipe = _cut(model)
    assert pipe.num_stages == 4
    assert_equal(dict(model.state_dict()), dict(before))
    assert model.forward == hooks
    assert [block.ways for block in model.blocks] == [[0, 0]] * 4
    assert pipe.get_stage_module(1).get_parameter("blocks.1.lin.weight") is model.blocks[1].lin.weight
    states = [pipe.get_stage_module(index).state_dict() for index in range(4)]
    assert set().union(*states) == model.state_dict().keys()
    assert _cut(model, {"blocks.3": END}).num_stages == 2
    assert "stage 1: blocks.1, " in str(pipe)
    assert "tied: embed.weight = head.weight in stages [0, 3]" in str(pipe.info())
    assert pipe.replicated_params == [{"submod_pp_0": "embed.weight", "submod_pp_3": "embed.weight"}]


def test_a_local_call_is_the_models_own() -> None:
    model = _model()
    pipe, other = _cut(model), copy.deepcopy(model)
    for mode in (True, False):
        args, target = _data(6)
        results = [runner(args[0], factor=args[1]) for runner in (pipe.train(mode), other.train(mode))]
        assert_equal(results[0], results[1])
        for result in results:
            _loss(result, target).backward()
    assert model.embed.weight.grad is not None
    assert_equal(model.embed.weight.grad, other.embed.weight.grad)
    assert not pipe.get_stage_module(0).get_submodule("blocks.0").training
    assert model.blocks[0].training  # the pipe's mode is its own


def test_any_arguments_will_do_that_the_model_takes() -> None:
    pipe = pipeline(_model(), _data(2)[0], {"power": 2, "skip": False}, split_spec=SPEC, frontend="modules")
    x, factor = _data(4)[0]
    for options in ({"power": 2, "skip": False}, {"power": 3}, {"skip": True}):
        assert_equal(pipe(x, factor, **options), _model()(x, factor, **options))


def test_a_sequential_is_cut_inside_and_annotations_count() -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH)), nn.Tanh()
    )
    annotate_split_points(chain, {"1.0": END})
    x = _data(4)[0][0]
    pipe = pipeline(chain, (x,), frontend="modules")
    assert [list(pipe.get_stage_module(index).state_dict()) for index in range(2)] == [
        ["0.weight", "0.bias"],
        ["1.1.weight", "1.1.bias"],
    ]
    assert torch.equal(pipe(x), chain(x))


def test_a_pipe_and_its_stages_can_be_pickled_and_copied() -> None:
    args, target = _data(4)
    for pipe in (pickle.loads(pickle.dumps(_cut(_model()))), copy.deepcopy(_cut(_model()))):
        output = pipe(*args)
        assert_equal(output, _model()(*args))
        _loss(output, target).backward()


def test_a_pipe_of_the_models_own_code_says_that_it_has_no_graph_of_the_whole() -> None:
    pipe = pipeline(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (x := torch.zeros(1, 2),), stages=1)
    assert torch.equal(pipe.whole(x), pipe(x))
    pipe = pipeline(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (x,), stages=1, frontend="modules")
    assert not hasattr(pipe, "whole")
    with pytest.raises(
        ModuleNameError, match="has no graph of the whole; use the model, or cut it with front"
    ):
        _ = pipe.whole


def test_the_loss_may_be_inside() -> None:
    class WithLoss(Looping):
        def forward(self, x: Tensor, factor: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            out = super().forward(x, factor)["out"]
            return out, functional.mse_loss(out, target)

    args, target = _data(4)
    pipe = _cut(_model(WithLoss), args=(*args, target), loss_spec=(False, True))
    model = _model(WithLoss)
    loss = model(*args, target)[1]
    loss.backward()
    assert torch.equal(pipe(*args, target)[1], loss)
    assert_equal(pipe.get_stage_module(0).get_parameter("embed.weight").grad, model.embed.weight.grad)


def test_a_built_stage_keeps_only_its_own_modules_alive() -> None:
    model = _model()
    watched = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    stage = _cut(model).build_stage(1)
    del model
    gc.collect()
    assert {name for name, reference in watched.items() if reference() is not None} == {
        f"blocks.1.{name}" for name in ("lin.weight", "lin.bias", "norm.weight", "norm.bias")
    }
    assert stage.index == 1


class Peeks(Looping):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        h = self.embed(x)
        return self.head(h) if h.sum() > 0 else h


class Modal(Looping):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        h = self.embed(x)
        return self.head(h) if self.training else self.blocks[0](h)


class Shares(Looping):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return self.blocks[0](self.head(self.blocks[0](x)))


class Starred(Looping):
    def forward(self, *values: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.embed(values[0]))


@pytest.mark.parametrize("make", [Peeks, Modal, Starred])
def test_what_lies_between_blocks_may_depend_on_anything(make: Callable[[], nn.Module]) -> None:
    model = _model(make)
    pipe, whole = _cut(model, {"embed": END}), copy.deepcopy(model)
    for mode in (True, False):
        for seed in range(3):
            args = _data(3, seed)[0]
            assert_equal(pipe.train(mode)(*args), whole.train(mode)(*args))


class Ragged(nn.Module):
    """Takes its rows in their own lengths, as a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = [row[: int(length)] for row, length in zip(self.first(x), lengths, strict=True)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
        means = torch.stack([row.mean(0) for row in self.inner(nested).unbind()])
        return self.last(means)  # type: ignore[no-any-return]


def test_a_nested_tensor_stays_in_its_stage() -> None:
    """It was refused in every cut, as one that an earlier stage had not handed on."""
    model, args = Ragged(), (torch.randn(2, 4, WIDTH), torch.tensor([3, 2]))
    pipe = pipeline(model, args, split_spec={"first": SplitPoint.END}, frontend="modules")
    assert torch.equal(pipe(*args), model(*args))
    with pytest.raises(CaptureError, match="makes or takes a sparse or nested tensor"):
        pipeline(model, args, split_spec={"inner": SplitPoint.END}, frontend="modules")


def test_a_buffer_may_require_a_gradient() -> None:
    """The copy that the cut was compared with had one that does not."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) * self.scale)  # type: ignore[no-any-return]

    model, x = Scaled(), torch.ones(1, 2)
    pipe = pipeline(model, (x,), split_spec={"last": BEGINNING}, frontend="modules")
    (expected,) = torch.autograd.grad(model(x).sum(), [model.scale])
    assert torch.equal(torch.autograd.grad(pipe(x).sum(), [model.scale])[0], expected)


def test_buffers_that_two_stages_would_share_are_refused() -> None:
    message = r"'blocks\.0\.norm' has buffers .* and runs in stages 0 and 1, which can't share them"
    with pytest.raises(CaptureError, match=message):
        _cut(_model(Shares), {"head": END})


def test_what_it_does_not_take_is_refused() -> None:
    args = _data(2)[0]
    with pytest.raises(ValueError, match='frontend="modules" does not take dynamic_shapes: it runs the'):
        pipeline(_model(), args, stages=2, dynamic_shapes=False, frontend="modules")
    with pytest.raises(AssignmentError, match="no operation of the model belongs to 'unused'"):
        _cut(_model(), {"unused": END})
    with pytest.raises(ValueError, match="does not take multi_use_param_spec"):
        _cut(_model(), multi_use_param_spec=MultiUseParameterConfig.TRANSMIT)
    with pytest.raises(ValueError, match="does not know where to cut"):
        pipeline(_model(), args, frontend="modules")
    with pytest.raises(ValueError, match="frontend is 'trace': choose 'export' or 'modules'"):
        pipeline(_model(), args, split_spec=SPEC, frontend="trace")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="ModuleList has no submodule '9'"):
        _cut(_model(), {"blocks.9": END})
    pipe = _cut(_model())
    with pytest.raises(ValueError, match="are plain modules: call the pipe's own build_stage"):
        build_stage(pipe.get_stage_module(0), 0, pipe.info())
    with pytest.raises(IndexError, match="there is no stage 4: this pipe has stages 0 to 3"):
        pipe.get_stage_module(4)


def test_tied_parameters_may_be_summed_once_a_step() -> None:
    args, target = _data(8)

    def body(comm: Comm) -> Any:
        stage = _cut(_model()).build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, _loss, tied_gradients="reduced")
        for _ in range(2):
            schedule.step(*args, target=target)
        return {name: p.grad for name, p in stage.module.named_parameters(remove_duplicate=False)}

    model = _model()
    _whole(model, ())
    for _ in range(2):
        for part in range(4):
            microbatch = [value.tensor_split(4)[part] for value in (*args, target)]
            (_loss(model(*microbatch[:2]), microbatch[2]) / 4).backward()
    gradients = InProcessWorld(4).run(body)
    assert torch.equal(gradients[0]["embed.weight"], gradients[3]["head.weight"])
    torch.testing.assert_close(gradients[0]["embed.weight"], model.embed.weight.grad)


class Rows(list[Any]):
    pass


class Record(OrderedDict[str, Any]):
    pass


@dataclass
class Fields(OrderedDict[str, Any]):
    """Like the outputs of transformers: a dataclass whose fields are items too."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        self.update((name, value) for name, value in vars(self).items() if value is not None)


class Returns(nn.Module):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.make = make

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.make(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Rows([x, Rows([x * 2])]),
        lambda x: Record(b=x, a=x * 2),
        lambda x: OrderedDict(b=x),
        lambda x: Fields(logits=x),
        lambda x: Fields(hidden=(Fields(x, x * 2), {"x": x})),
    ],
)
def test_the_output_is_of_the_models_own_classes(make: Callable[[Any], Any]) -> None:
    model, x = Returns(make), torch.randn(2, 4)
    for _ in range(2):  # each run makes one of its own
        pipe = pipeline(model, (x,), split_spec={"blocks.2": BEGINNING}, frontend="modules")
        partita.verify(pipe, model, (x,)).check()
    assert repr(pipe(x)) == repr(model(x))
    assert pipe(x) is not pipe(x)


class Counted(dict[str, Any]):
    def __init__(self, count: int) -> None:
        super().__init__(count=count)


def test_an_output_that_is_no_tree_of_its_items_is_the_models_own_too() -> None:
    def make(x: Any) -> Counted:
        output = Counted(1)
        output["x"] = x
        return output

    model, x = Returns(make), torch.randn(2, 4)
    pipe = pipeline(model, (x,), split_spec={"blocks.2": BEGINNING}, frontend="modules")
    output = pipe(x)
    assert type(output) is Counted
    assert output["count"] == 1
    assert torch.equal(output["x"], model(x)["x"])


def test_a_cut_says_what_it_was_compared_on() -> None:
    model = Returns(lambda x: {"loss": x.sum()})
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"blocks.2": BEGINNING}, frontend="modules")
    assert pipe.proof.holds
    assert "in training and evaluation on the example, a sample with other values" in str(pipe.info())
    assert pipe.build_stage(1).loss_fn is not None
    unproven = pipeline(
        model, (torch.randn(2, 4),), split_spec={"blocks.2": BEGINNING}, frontend="modules", prove=False
    )
    assert not unproven.proof.holds


class Frozen(nn.Module):
    """Freezes its normalisation and its first layer in a ``train`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(0.5)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        self.drop.train()
        self.first.weight.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("prove", [True, False])
@pytest.mark.parametrize("spec", [{"head": BEGINNING}, {"norm": BEGINNING, "head": BEGINNING}])
def test_the_models_own_train_sets_the_flags_of_its_stages(prove: bool, spec: dict[str, SplitPoint]) -> None:
    model = _model(Frozen).train()
    whole, pipe = copy.deepcopy(model), _cut(model, spec, (_data(4)[0][0],), prove=prove)
    stage = pipe.build_stage(pipe.num_stages - 2).module
    for mode in (True, False, True):
        whole.train(mode)
        pipe.train(mode)
        stage.train(mode)
        flags = {name: module.training for name, module in whole.named_modules()}
        for runs in (*(pipe.get_stage_module(index) for index in range(pipe.num_stages)), stage):
            assert {name: module.training for name, module in runs.named_modules()} == flags
        torch.manual_seed(1)
        expected = whole(_data(5)[0][0])
        torch.manual_seed(1)
        assert_equal(pipe(_data(5)[0][0]), expected)
    assert "first.weight" not in dict(pipe.get_stage_module(pipe.num_stages - 1).named_parameters())


class Recomputed(Looping):
    """Computes its blocks again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.training else block(h)
        return self.end(h)

    def end(self, h: Tensor) -> Tensor:
        return self.head(h)  # type: ignore[no-any-return]


class RecomputedToTheEnd(Recomputed):
    def end(self, h: Tensor) -> Tensor:
        return checkpoint(self.head, h, use_reentrant=False) if self.training else self.head(h)  # type: ignore[no-any-return]


def test_a_plan_cuts_nowhere_within_a_checkpoint() -> None:
    model, x = _model(Recomputed), _data(4)[0][0]
    pipe = pipeline(model, (x,), stages=2, frontend="modules")
    assert "stage 1: head, " in str(pipe)
    assert_equal(pipe(x), copy.deepcopy(model)(x))


@pytest.mark.parametrize(("make", "stages", "most"), [(Recomputed, 3, 2), (RecomputedToTheEnd, 2, 1)])
def test_more_stages_than_places_outside_of_checkpoints_are_refused(
    make: type[nn.Module], stages: int, most: int
) -> None:
    message = (
        rf"{stages} stages were asked for, but {make.__name__} can be cut into at most {most}: no cut lies "
        r"within torch\.utils\.checkpoint.*'blocks\.0'.*Let modules call it themselves"
    )
    with pytest.raises(InfeasiblePlan, match=message):
        pipeline(_model(make), (_data(4)[0][0],), stages=stages, frontend="modules")
    pipe = pipeline(_model(make), (_data(4)[0][0],), stages=stages, frontend="modules", modes="eval")
    assert pipe.num_stages == stages


class Jacobian(nn.Module):
    """Calls a layer under transforms, whose tensors can't leave them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        jacobian = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.layers[2](row))))(x)
        return self.layers[3](x + jacobian.sum(-1))  # type: ignore[no-any-return]


def test_no_cut_lies_within_a_transform() -> None:
    model, x = _model(Jacobian), _data(4)[0][0]
    for options in ({"stages": 2}, {"stages": 3}, {"split_spec": {"layers.3": BEGINNING}}):
        pipe = pipeline(model, (x,), frontend="modules", **options)  # type: ignore[arg-type]
        assert pipe.proof.holds
        assert_equal(pipe(x), copy.deepcopy(model)(x))
    message = r"the cut at 'layers\.2' lies within a transform of torch\.func .*cut at a module around it"
    with pytest.raises(CaptureError, match=message):
        pipeline(model, (x,), split_spec={"layers.2": BEGINNING}, frontend="modules")
    with pytest.raises(InfeasiblePlan, match=r"at most 3: no cut lies within a transform of torch\.func"):
        pipeline(model, (x,), stages=4, frontend="modules")


class Ensemble(nn.Module):
    """Runs one layer with the stacked parameters of several, as the tutorial of ``torch.func`` does."""

    def __init__(self) -> None:
        super().__init__()
        stacked, _ = torch.func.stack_module_state([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.members = nn.ParameterDict({name: nn.Parameter(one.detach()) for name, one in stacked.items()})
        self.base = [nn.Linear(WIDTH, WIDTH, device="meta")]  # without memory, and not registered
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def member(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(self.base[0], parameters, (x,))  # type: ignore[no-any-return]

        every = torch.func.vmap(member, (0, None))(dict(self.members), self.first(x).tanh())
        return self.last(every.mean(0))  # type: ignore[no-any-return]


def test_parameters_that_are_used_within_a_transform_only_go_to_its_stage() -> None:
    """They went to the last stage, since nobody was seen to use them, and every cut was refused."""
    model, x = _model(Ensemble), _data(4)[0][0]
    pipe = pipeline(model, (x,), stages=2, frontend="modules")
    assert "members.weight" in dict(pipe.get_stage_module(0).named_parameters())
    partita.verify(pipe, model, (x,)).check()


class HandedOut(nn.Module):
    """A layer takes what a transform returns as it is."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.transform = transform
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.transform(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "transform",
    [
        torch.vmap(torch.sin),
        torch.vmap(torch.sin, in_dims=1, out_dims=1),
        torch.func.grad(lambda x: x.sin().sum()),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
        lambda x: torch.vmap(lambda column: column, in_dims=1)(x).t(),
    ],
    ids=["vmap", "columns", "grad", "jvp", "unchanged"],
)
@pytest.mark.parametrize("spec", [{"first": END}, {"last": BEGINNING}], ids=["before", "after"])
def test_what_a_transform_returns_crosses_a_cut(transform: Any, spec: Any) -> None:
    """No function was seen to make it, so no stage handed it on: the cut was refused."""
    model, x = _model(partial(HandedOut, transform)), _data(4)[0][0]
    pipe = pipeline(model, (x,), split_spec=spec, frontend="modules")
    partita.verify(pipe, model, (x,)).check()


class Discriminates(nn.Module):
    """A generator, and a discriminator that sees its output and the data, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.judge = nn.Sequential(*(part for _ in range(3) for part in _judging()))

    def forward(self, x: Tensor) -> Tensor:
        return functional.softplus(self.judge(self.generator(x))).mean() - self.judge(x).mean()


def _judging() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)


def test_a_plan_cuts_nowhere_between_calls_that_write_to_the_same_buffers() -> None:
    """The planner cut within the discriminator, whose running averages two stages can't share; the cut was
    refused then, with the advice to make another one.
    """
    model, x = _model(Discriminates), _data(4)[0][0]
    for stages in (2, 3):
        pipe = pipeline(model, (x,), stages=stages, frontend="modules")
        assert pipe.num_stages == stages
        assert_equal(pipe(x), copy.deepcopy(model)(x))
    message = r"at most 4: no cut lies between two calls of a module that writes to its buffers.*'judge\.1'"
    with pytest.raises(InfeasiblePlan, match=message):
        pipeline(model, (x,), stages=5, frontend="modules")
    assert pipeline(model, (x,), stages=4, frontend="modules").num_stages == 4


class Centres(nn.Module):
    """Subtracts a running mean of the end from the beginning, and assigns it anew in each call."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x)) - self.center
        x = self.blocks[2](x)
        self.center = self.center * 0.9 + x.detach().mean(0) * 0.1
        return self.blocks[3](x)  # type: ignore[no-any-return]


def test_a_plan_cuts_nowhere_between_a_buffers_use_and_its_assignment() -> None:
    model, x = _model(Centres), _data(4)[0][0]
    pipe = pipeline(model, (x,), stages=3, frontend="modules")
    whole = copy.deepcopy(model)
    for _ in range(2):
        assert_equal(pipe(x), whole(x))
    for prove in (True, False):
        with pytest.raises(
            CaptureError, match=r"'the model' has buffers \('center'\) and runs in stages 0 and 1"
        ):
            pipeline(model, (x,), split_spec={"blocks.2": BEGINNING}, frontend="modules", prove=prove)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Dirty.apply(layer(x).tanh() + 1)
        return x


def test_functions_that_write_to_their_inputs_run_on_every_stage() -> None:
    """Torch resets the hooks of what such a function has written to; where that was a tensor without values,
    in a stage that came later, it did not, and the model seemed to go another way.
    """
    torch.manual_seed(0)
    model, x = Overwriting(), torch.randn(2, WIDTH)
    pipe = pipeline(model, (x,), split_spec={"layers.1": BEGINNING}, frontend="modules")
    partita.verify(pipe, model, (x,), explain=False).check()


class _Scaled(nn.Module):
    """As torchao's fake quantisers, it sets what it has computed as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.detach().abs().max()
        return x / self.scale


def test_an_attribute_that_forward_sets_in_a_stage_is_compared_there() -> None:
    """It was said to differ: a later stage knows no more of it than its shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Scaled(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2, WIDTH)
    pipe = pipeline(model, (x,), split_spec={"2": BEGINNING}, frontend="modules")
    partita.verify(pipe, model, (x,), explain=False).check()


class _Quantised(nn.Parameter):
    """As in bitsandbytes, what its layer needs beside the numbers is an attribute of the weight."""

    scale: Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> _Quantised:
        copied = memo[id(self)] = type(self)(torch.empty(0, dtype=self.dtype), requires_grad=False)
        copied.data = copy.deepcopy(self.data, memo)  # which a tensor of the meta device can't be
        copied.scale = copy.deepcopy(self.scale, memo)
        return copied


class _Dequantising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        scale = torch.rand(WIDTH, 1)
        self.weight = _Quantised(torch.randint(-3, 4, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.weight.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, _Quantised)
        return functional.linear(x, self.weight * self.weight.scale)


def test_parameters_of_classes_of_their_own_keep_class_and_attributes_on_all_stages() -> None:
    """On the stages of other layers they were plain: "'Parameter' object has no attribute 'scale'". Copies of
    what stands for them there went through their class, which can't.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(_Dequantising() for _ in range(3)))
    x = torch.randn(2, WIDTH)
    pipe = pipeline(model, (x,), split_spec={"2": BEGINNING}, frontend="modules")
    partita.verify(pipe, model, (x,), explain=False).check()


def test_labels_for_the_profiler_stand_on_every_stage() -> None:
    """Their handle can't leave its stage, so no model with a label could be cut."""

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                with torch.profiler.record_function(f"layer {number}"):
                    x = layer(x)
            return x

    model, x = _model(Labelled), _data(4)[0][0]
    assert_equal(pipeline(model, (x,), stages=2, frontend="modules")(x), copy.deepcopy(model)(x))
