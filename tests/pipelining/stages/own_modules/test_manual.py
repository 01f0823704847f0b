"""Stages that are plain modules: equal to the chain of the same modules over the same microbatches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from tests.pipelining.models import WIDTH
from tests.pipelining.running import assert_equal
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from partita._torch import fake_module
from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from partita.pipelining.stages.own_modules import crossing, manual
from partita.runtime import (
    Comm,
    InProcessWorld,
    RandomKey,
    enter_site,
    keyed,
    merge,
    plan_microbatches,
    split_args,
)

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Start(nn.Module):
    """Batch norm, dropout; and writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.lin = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.lin(self.norm(x)))


class Spread(nn.Module):
    """A named tuple of a transposed view and integers; nothing is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Pair:
        h = functional.relu(x, inplace=True)
        return Pair(self.lin(h).chunk(2, 1)[1].t(), h.argmax(1))


class Gather(nn.Module):
    """A dict with a number, None and a boolean tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)

    def forward(self, h: Tensor, best: Tensor, scale: float = 1.0) -> dict[str, Any]:
        h = self.lin(h.t()) + self.table(best) * scale
        return {"h": [h, None], "large": h > 0, "rows": h.shape[0], "name": "gather"}


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.lin = nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)

    def forward(self, received: dict[str, Any]) -> tuple[Tensor, int]:
        assert (received["name"], received["h"][1]) == ("gather", None)
        return self.lin(self.drop(torch.where(received["large"], received["h"][0], 0.0))) / received[
            "rows"
        ], 3


def _loss(output: tuple[Tensor, int], target: Tensor) -> Tensor:
    return functional.mse_loss(output[0], target)


def _chain() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Start(), Spread(), Gather(), End()]


def _batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


class Whole:
    """The chain over microbatches in order, random numbers by the rule for plain modules."""

    def __init__(
        self, modules: Sequence[nn.Module], count: int, loss: Callable[[Any, Tensor], Tensor]
    ) -> None:
        self.modules, self.count, self.loss, self.steps = modules, count, loss, 0

    def run(self, x: Any, target: Tensor, train: bool, losses: list[Tensor], **kwargs: Any) -> Any:
        outputs = []
        losses.clear()
        weights = plan_microbatches((x,), kwargs, self.count).weights
        targets = split_args((target,), None, self.count)
        for number, (args, named) in enumerate(split_args((x,), kwargs, self.count)):
            h: Any = args
            with keyed(RandomKey(0, self.steps, number)), torch.set_grad_enabled(train):
                for index, module in enumerate(self.modules):
                    enter_site(index)
                    h = module(*h, **named) if isinstance(h, tuple) else module(h, **named)
                loss = self.loss(h, targets[number][0][0])
            if train:
                torch.autograd.backward(loss, torch.tensor(weights[number]))
            losses.append(loss.detach())
            outputs.append(copy.deepcopy(_detached(h)))
        self.steps += train
        return merge(outputs)

    def step(self, x: Any, target: Tensor, losses: list[Tensor], **kwargs: Any) -> Any:
        return self.run(x, target, True, losses, **kwargs)

    def eval(self, x: Any, target: Tensor, losses: list[Tensor], **kwargs: Any) -> Any:
        return self.run(x, target, False, losses, **kwargs)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value


Body = Callable[[Any, Sequence[nn.Module]], Any]


def _train(runner: Any, modules: Sequence[nn.Module]) -> list[Any]:
    """Steps and evaluations with batches of several sizes, uneven ones too."""
    seen: list[Any] = []
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for number, samples in enumerate((8, 8, 10, 12)):
        losses: list[Tensor] = []
        x, target = _batch(samples, seed=number)
        output = runner.step(x, target=target, losses=losses)
        seen += [output, list(losses), [p.grad.clone() for p in parameters if p.grad is not None]]
        if number == 1:
            output = runner.eval(x, target=target, losses=losses)
            seen += [output, list(losses)]
            runner.step(x, target=target, losses=losses)
            seen += [[p.grad.clone() for p in parameters if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    for module in modules:
        module.eval()
    seen += [runner.eval(x, target=target, losses=losses), list(losses)]
    return [*seen, [{k: v.clone() for k, v in module.state_dict().items()} for module in modules]]


def _whole(make: Callable[[], list[nn.Module]], body: Body, count: int = 4, loss: Any = _loss) -> Any:
    modules = make()
    return body(Whole(modules, count, loss), modules)


def _staged(
    make: Callable[[], list[nn.Module]],
    body: Body,
    count: int = 4,
    loss: Any = _loss,
    kind: Any = Schedule1F1B,
    **options: Any,
) -> list[Any]:
    size = len(make())

    def run(comm: Comm) -> Any:
        module = make()[comm.rank]
        stage = PipelineStage(module, comm.rank, size, CPU, comm=comm, **options)
        return body(kind(stage, count, loss), [module])

    return InProcessWorld(size).run(run)


def _assert_same(pipelined: list[Any], expected: Any) -> None:
    """``found``: of each rank; outputs and losses are on the last, gradients and states on their own."""
    for place, value in enumerate(expected):
        theirs = [seen[place] for seen in pipelined]
        if isinstance(value, list) and value and isinstance(value[0], Tensor) and value[0].dim() == 0:
            assert_equal(theirs[-1], value, f"losses {place}")
        elif isinstance(value, list):
            assert_equal([item for part in theirs for item in part], value, f"gradients or states {place}")
        else:
            assert_equal(theirs[-1], value, f"output {place}")
            assert all(other is None for other in theirs[:-1])


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_a_chain_of_modules_trains_like_the_whole_whatever_it_hands_on(kind: Any) -> None:
    _assert_same(_staged(_chain, _train, kind=kind), _whole(_chain, _train))


def _two_each(comm: Comm) -> bytes:
    torch.set_num_threads(1)
    indices = (2 * comm.rank, 2 * comm.rank + 1)
    modules = [_chain()[index] for index in indices]
    # their comm comes from the default process group
    stages = [PipelineStage(module, index, 4, CPU) for index, module in zip(indices, modules, strict=True)]
    return pickle.dumps(_train(ScheduleGPipe(stages, 4, _loss), modules))


def test_processes_equal_the_whole() -> None:
    ends = endings(2, _two_each)
    assert [ending.error for ending in ends] == [None, None], ends[0].text
    _assert_same([pickle.loads(ending.result) for ending in ends], _whole(_chain, _train))


def test_nothing_is_run_on_data_to_find_shapes() -> None:
    """There, the first step runs the real forward once more: batch norm counts one batch too many."""
    calls = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.seen = nn.BatchNorm1d(WIDTH), 0

        def forward(self, x: Tensor) -> Tensor:
            calls.append(type(x))
            self.seen += 1
            return self.norm(x) + torch.rand(WIDTH)

    def body(runner: Any, modules: Sequence[nn.Module]) -> Any:
        runner.step(*_batch(8)[:1], target=_batch(8)[1])
        return modules[0]

    _batch(8)  # seeds
    state = torch.get_rng_state()
    first, second = _staged(lambda: [Counts(), Counts()], body, count=2, loss=functional.mse_loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first.norm.num_batches_tracked, first.seen) == (2, 2)
    assert (second.norm.num_batches_tracked, second.seen) == (2, 2)
    assert [kind is Tensor for kind in calls].count(False) == 1  # stage 0, once, without data


def test_shapes_are_found_once_for_steps_and_evaluations_of_equal_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[Any] = []

    def counted(*args: Any) -> Any:
        batches.append(args[1][0].shape[0])
        return fake_module.run_on_fakes(*args)

    monkeypatch.setattr(crossing, "run_on_fakes", counted)
    x, target = _batch(8)

    def body(runner: Any, modules: Sequence[nn.Module]) -> None:
        for _ in range(2):
            runner.eval(x, target=target)
            runner.step(x, target=target)
        runner.step(x[:4], target=target[:4])
        runner.eval(x, target=target)

    _staged(
        lambda: [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], body, count=2, loss=functional.mse_loss
    )
    assert batches == [4, 2]


def test_freezing_and_autocast_between_two_steps_are_noticed() -> None:
    x, target = _batch(8)

    def body(runner: Any, modules: Sequence[nn.Module]) -> list[Any]:
        seen: list[Any] = []
        for dtype in (None, torch.bfloat16, None):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                seen.append(runner.step(x, target=target, losses=[]))
        for module in modules:
            if not isinstance(module, nn.Linear):
                module.requires_grad_(False)
        seen.append(runner.step(x, target=target, losses=[]))
        seen.append([p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None])
        return seen

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output.float(), target)

    _assert_same(_staged(make, body, loss=loss), _whole(make, body, loss=loss))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, power: int = 1) -> Tensor:
        return self.lin(x).masked_fill(mask, 0.0) ** power


def test_keyword_arguments_go_to_the_stages_of_the_rank_that_is_given_them() -> None:
    x, target = _batch(8)
    mask = x > 0.5

    def body(runner: Any, modules: Sequence[nn.Module]) -> Any:
        return [runner.step(x, target=target, losses=[], mask=mask, power=2)]

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Masked(), Masked()]

    _assert_same(_staged(make, body, loss=functional.mse_loss), _whole(make, body, loss=functional.mse_loss))


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        (ScheduleGPipe, (0, 0, 1, 1)),
        (ScheduleLoopedBFS, (0, 1, 0, 1)),
        (ScheduleInterleaved1F1B, (0, 1, 0, 1)),
        (ScheduleInterleavedZeroBubble, (0, 1, 0, 1)),
        (ScheduleZBVZeroBubble, (0, 1, 1, 0)),
        (ScheduleDualPipeV, (0, 1, 1, 0)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_several_stages_on_a_rank_under_every_schedule(kind: Any, placement: tuple[int, ...]) -> None:
    expected = _whole(_chain, _train)

    def run(comm: Comm) -> Any:
        indices = [index for index, rank in enumerate(placement) if rank == comm.rank]
        modules = [_chain()[index] for index in indices]
        stages = [
            PipelineStage(module, index, 4, CPU, comm=comm)
            for index, module in zip(indices, modules, strict=True)
        ]
        return placement, indices, _train(kind(stages, 4, _loss), modules)

    by_rank = InProcessWorld(2).run(run)
    last = placement[-1]
    for place, value in enumerate(expected):
        theirs = [seen[place] for _, _, seen in by_rank]
        if not isinstance(value, list) or (value and isinstance(value[0], Tensor) and value[0].dim() == 0):
            assert_equal(theirs[last], value, f"output or losses {place}")
    states = [dict(zip(indices, seen[-1], strict=True)) for _, indices, seen in by_rank]
    assert_equal([(states[0] | states[1])[index] for index in range(4)], expected[-1], "states")


class Branches(nn.Module):
    """Which way it goes depends on the data: no shape can be found without."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.sum() > 0 else self.lin(x).tanh()


def _branching() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Branches(), nn.Linear(WIDTH, WIDTH)]


def _two_steps(runner: Any, modules: Sequence[nn.Module]) -> list[Any]:
    return [runner.step(*_batch(n)[:1], target=_batch(n)[1], losses=[]) for n in (8, 10)]


@pytest.mark.parametrize(
    "options",
    [
        {"output_args": lambda x: x.new_empty(x.shape)},
        {"input_args": torch.empty(2, WIDTH), "output_args": torch.empty(2, WIDTH, device="meta")},
    ],
    ids=["a function", "an example"],
)
def test_a_module_that_needs_data_says_what_to_give_and_runs_with_it(options: dict[str, Any]) -> None:
    with pytest.raises(
        ExecutionError, match=r"what stage 0 returns for inputs like .* can't be found without"
    ):
        _staged(_branching, _two_steps, loss=functional.mse_loss)
    expected = _whole(_branching, _two_steps, loss=functional.mse_loss)
    _assert_same(_staged(_branching, _two_steps, loss=functional.mse_loss, **options), expected)


def test_a_wrong_example_is_an_error_that_shows_both_shapes() -> None:
    with pytest.raises(
        SignatureMismatch, match=r"stage 0 makes output of stage 0: float32\[2, 8\].*float32\[3, 8\]"
    ):
        _staged(_branching, _two_steps, loss=functional.mse_loss, output_args=torch.empty(3, WIDTH))


class Odd(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.result = nn.Linear(WIDTH, WIDTH), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.lin(x))


def _odd(result: Callable[[Tensor], Any], samples: int = 8, **options: Any) -> None:
    def body(runner: Any, modules: Sequence[nn.Module]) -> Any:
        return runner.eval(_batch(samples)[0])

    _staged(lambda: [Odd(result), nn.Identity()], body, loss=None, **options)


def test_what_can_not_cross_is_refused() -> None:
    with pytest.raises(
        ExecutionError, match=r"output of stage 0 holds function, which can't be sent to another"
    ):
        _odd(lambda h: (h, lambda: 3))
    with pytest.raises(
        SignatureMismatch, match=r"(?s)stage 0 returns .* for microbatch 3 and .* for microbatch 0"
    ):
        _odd(lambda h: (h,) * h.shape[0], samples=7)
    with pytest.raises(
        SignatureMismatch, match=r"stage 0 returns 2 for output of stage 0\[1\] = 1: what depends"
    ):
        _odd(lambda h: (h, 2), output_args=(torch.empty(2, WIDTH), 1))
    with pytest.raises(SignatureMismatch, match="was found for these inputs: return the same structure"):
        _odd(lambda h: (h, h), output_args=torch.empty(2, WIDTH))
    with pytest.raises(SignatureMismatch, match="stage 0 returns 600 tensors: return fewer than 512"):
        _odd(lambda h: [h] * 600)
    with pytest.raises(ExecutionError, match=r"a tensor \(2, 8\) of layout sparse_coo is to be sent"):
        _odd(lambda h: (h, h.detach().to_sparse()))


class Reuses(nn.Module):
    """Hands out a buffer that the next microbatch writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.lin(x)
        with torch.no_grad():
            self.seen.copy_(h)
        return h, self.seen[:, 1:]


class Sums(nn.Module):
    def forward(self, h: Tensor, seen: Tensor) -> Tensor:
        return h * seen.sum(1, keepdim=True)


def test_a_buffer_that_is_handed_out_is_copied() -> None:
    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Reuses(), Sums()]

    def body(runner: Any, modules: Sequence[nn.Module]) -> Any:
        return [runner.step(*_batch(8)[:1], target=_batch(8)[1], losses=[])]

    expected = _whole(make, body, loss=functional.mse_loss)
    _assert_same(_staged(make, body, loss=functional.mse_loss, kind=ScheduleGPipe), expected)


class OfGraph(nn.Module):
    """Mixes features along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("edges", torch.eye(WIDTH).flip(0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return (self.edges @ self.lin(x).t()).t()


def test_a_stage_may_have_sparse_buffers() -> None:
    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [OfGraph(), nn.Linear(WIDTH, WIDTH)]

    expected = _whole(make, _two_steps, loss=functional.mse_loss)
    _assert_same(_staged(make, _two_steps, loss=functional.mse_loss), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_index": 2}, "stage_index is 2: of 2 stages it is 0 to 1"),
        ({"stage_index": -1}, "stage_index is -1: of 2 stages it is 0 to 1"),
    ],
)
def test_what_a_stage_can_not_be_made_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStage(nn.Linear(2, 2), **{"stage_index": 0, "num_stages": 2, "device": CPU, **options})


def test_a_stage_has_torchs_names_too() -> None:
    module = nn.Linear(2, 2)
    stage = PipelineStage(module, 1, 2, "cpu")
    assert (stage.submod, stage.stage_index, stage.num_stages, stage.is_last) == (module, 1, 2, True)
    assert PipelineStage(nn.ReLU(), 0, 2, "meta").device == torch.device("meta")


def test_a_stage_can_be_pickled_and_copied() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 1, 2, "cpu", output_args=torch.empty(3, 2))
    for other in (pickle.loads(pickle.dumps(stage)), copy.deepcopy(stage)):
        assert (other.index, other.num_stages, other.device) == (1, 2, CPU)
        assert_equal(dict(other.module.state_dict()), dict(stage.module.state_dict()))


def test_a_module_set_later_is_the_one_that_runs() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", get_mesh=lambda *_: None)
    stage.submod = torch.nn.Sequential(stage.submod)
    assert stage.module is stage.submod
    other = nn.Linear(2, 2)
    stage.submod = other

    def body(comm: Comm) -> Any:
        stage.comm = comm
        return ScheduleGPipe(stage, 1).step(torch.ones(1, 2))

    assert torch.equal(InProcessWorld(1).run(body)[0], other(torch.ones(1, 2)))
    assert PipelineStage(nn.Linear(2, 2, device="meta"), 0, 1, "cpu").device == CPU


class Deferred(nn.Module):
    """Puts the gradient of its weight off, and computes it when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.waiting: list[Callable[[], None]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = functional.linear(x, self.lin.weight.detach())
        if not out.requires_grad:
            out.requires_grad_()
        out.register_hook(lambda grad: self.waiting.append(lambda: self._add(grad.t() @ x.detach())))
        return out * 1.0

    def _add(self, gradient: Tensor) -> None:
        weight = self.lin.weight
        weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def build(self) -> Callable[[], None]:
        waiting, self.waiting = self.waiting, []
        return lambda: [run() for run in waiting] and None


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_a_dw_builder_is_asked_after_each_backward_pass_and_run_in_w(kind: Any) -> None:
    def run(deferred: bool) -> Any:
        def body(comm: Comm) -> Any:
            torch.manual_seed(0)
            modules = [Deferred() for _ in range(2)]
            submodules = modules if deferred else [module.lin for module in modules]
            stages = [
                PipelineStage(
                    module, number, 2, CPU, comm=comm, dw_builder=modules[number].build if deferred else None
                )
                for number, module in enumerate(submodules)
            ]
            x, target = _batch(8)
            kind(stages, 4, functional.mse_loss).step(x, target=target)
            return [module.lin.weight.grad for module in modules]

        return InProcessWorld(1).run(body)[0]

    assert_equal(run(True), run(False))


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, positions: Tensor, mask: Any = None) -> Tensor:
        assert mask is None or mask.mask_mod is not None
        return self.lin(x) + positions.unsqueeze(-1)


def _positioned(wrap: Callable[[nn.Module], nn.Module], **kwargs: Any) -> Any:
    modules = [wrap(Positioned()) for _ in range(2)]
    stages = [PipelineStage(module, number, 2, CPU) for number, module in enumerate(modules)]
    losses: list[Tensor] = []
    schedule = ScheduleGPipe(stages, 2, functional.mse_loss)
    x = torch.ones(4, 4)
    output = schedule.step(x, positions=torch.arange(4.0), target=x, losses=losses, **kwargs)
    schedule.close()
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    whole = [getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)() for gradient in gradients]
    return output, [loss.detach() for loss in losses], whole


@pytest.mark.usefixtures("alone")
def test_keyword_arguments_reach_wrapped_modules() -> None:
    """`step(positions=p)` raised a TypeError where the module was in DDP or sharded."""
    expected = _positioned(lambda module: module)
    assert_equal(_positioned(nn.parallel.DistributedDataParallel), expected)
    mesh = init_device_mesh("cpu", (1,))
    assert_equal(_positioned(lambda module: fully_shard(module, mesh=mesh)), expected)


@pytest.mark.usefixtures("alone")
def test_keyword_arguments_that_can_not_be_pickled_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were refused, though nobody sends them; a new one of the same kind is known."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(args[-1])
        return crossing.inferred(*args)

    monkeypatch.setattr(manual, "inferred", counted)
    expected = _positioned(lambda module: module)

    def mask() -> Any:
        lengths = torch.arange(4)
        return create_block_mask(lambda b, h, q, k: k < lengths[b], 4, None, 128, 128, device="cpu")

    assert_equal(_positioned(lambda module: module, mask=mask()), expected)
    stage = PipelineStage(Positioned(), 0, 2, CPU)
    calls.clear()
    for _ in range(3):
        keywords = {"positions": torch.zeros(4), "mask": mask()}
        stage.outgoing(crossing.Crossing.of((torch.ones(4, 4),), "args"), keywords)
    assert calls == [0]


@pytest.mark.usefixtures("alone")
def test_a_dtensor_is_refused_only_where_it_crosses() -> None:
    mesh = init_device_mesh("cpu", (1,))

    class Distributed(nn.Module):
        def __init__(self, local: bool) -> None:
            super().__init__()
            self.local, self.lin = local, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = DTensor.from_local(self.lin(x), mesh, [Replicate()])
            return out.to_local() if self.local else out

    def run(local: bool) -> Any:
        modules = [Distributed(local), nn.Identity()]
        stages = [
            PipelineStage(module, number, 2, CPU, get_mesh=lambda *_: mesh)
            for number, module in enumerate(modules)
        ]
        schedule = ScheduleGPipe(stages, 2)
        try:
            return schedule.step(torch.ones(4, 4))
        finally:
            schedule.close()

    assert run(local=True).shape == (4, 4)
    with pytest.raises(ExecutionError, match=r"output of stage 0 is a DTensor .* let the next stage call"):
        run(local=False)
