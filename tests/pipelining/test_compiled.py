"""A pipeline of compiled stages equals the uncut eager model bit for bit, and W is not empty."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.group_of_one import group_of_one
from tests.pipelining.models import CASES, NORMED, PLAIN, REGIONS, SKIP, TRANSFORMER, WIDTH, Case, _Four
from tests.pipelining.running import Record, assert_equal, assert_same, cut, piped, train, uncut
from tests.traced_regions import need_traced_regions
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from partita.errors import NotCompiled
from partita.pipelining import (
    PipelineStage,
    Schedule1F1B,
    SplitPoint,
    UncutReference,
    get_schedule_class,
    pipeline,
)
from partita.planning import loop_placement, v_placement
from partita.runtime import Comm, InProcessWorld

SPLIT = {
    "ZBVZeroBubble": v_placement(4, 2),
    "InterleavedZeroBubble": loop_placement(4, 2),
    "DualPipeV": v_placement(4, 2),
}

NOT_DEAR = [(TRANSFORMER, "InterleavedZeroBubble"), (NORMED, "ZBVZeroBubble"), (SKIP, "DualPipeV")]
IN_EVERY_CHECK = {"batch norm", "counting", "in place", "outputs", "regions", "reused buffer", "transformer"}
"""What they are made of is in graphs in some way of its own."""


def _assert_compiled_equals_eager(
    case: Case, kind: str, placement: Sequence[int] | None = None, **options: Any
) -> None:
    stages = len(case.after) + 1 if placement is None else len(placement)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        records = piped(
            cut(case, stages, compile="aot_eager", **options), case, get_schedule_class(kind), 4, placement
        )
    assert_same(records, uncut(case))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in IN_EVERY_CHECK else [pytest.mark.dear], id=case.name)
        for case in CASES
    ],
)
def test_stages_under_1f1b(case: Case) -> None:
    if case is REGIONS:
        need_traced_regions()
    _assert_compiled_equals_eager(case, "1F1B")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(
            case, kind, marks=[] if (case, kind) in NOT_DEAR else [pytest.mark.dear], id=f"{case.name}-{kind}"
        )
        for case in (TRANSFORMER, NORMED, SKIP)
        for kind in SPLIT
    ],
)
def test_stages_whose_backward_pass_is_split(case: Case, kind: str) -> None:
    _assert_compiled_equals_eager(case, kind, SPLIT[kind])


@pytest.mark.parametrize(
    ("stance", "backend"), [("default", "aot_eager"), ("aot_eager_then_compile", None)], ids=str
)
def test_a_backward_pass_that_a_stance_lets_another_backend_compile_is_whole(
    stance: str, backend: str | None
) -> None:
    """It was asked for its first half, and then for a second one that it does not have: the gradients of
    weights were missing, without a word.
    """
    with torch.compiler.set_stance(stance, force_backend=backend):
        _assert_compiled_equals_eager(PLAIN, "ZBVZeroBubble", SPLIT["ZBVZeroBubble"])


@pytest.mark.parametrize("setting", ["disable", "suppress_errors"])
def test_stages_run_as_they_are_where_torch_is_set_to_compile_nothing(setting: str) -> None:
    """Under ``TORCH_COMPILE_DISABLE=1`` a step raised torch's "found no compiled frames"."""
    with torch._dynamo.config.patch({setting: True}):
        _assert_compiled_equals_eager(PLAIN, "ZBVZeroBubble", SPLIT["ZBVZeroBubble"])


@pytest.mark.parametrize(
    "again",
    [pytest.param(True, marks=pytest.mark.dear), ("blocks.*.feed", "norm", "embedding")],
    ids=["as a whole", "in parts"],
)
def test_stages_that_are_recomputed(again: Any) -> None:
    _assert_compiled_equals_eager(TRANSFORMER, "ZBVZeroBubble", SPLIT["ZBVZeroBubble"], recompute=again)


class ScaledByCalls(nn.Linear):
    """Counts its calls in a buffer, and its result and gradients depend on the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x).tanh() * self.calls


class InBfloat16(nn.Linear):
    """Computes in bfloat16, whatever autocast it is called under."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result = super().forward(x).tanh()
        return result.float()


def _four_of(layer: type[nn.Module]) -> nn.Module:
    return nn.Sequential(OrderedDict((name, layer()) for name in "abcd"))


def test_what_is_recomputed_has_autocast_blocks_of_its_own() -> None:
    """Its stage ran uncompiled: Dynamo's nodes of such a block had no keywords in the graph of a region."""
    need_traced_regions()
    case = Case("bfloat16", partial(_four_of, InBfloat16))
    _assert_compiled_equals_eager(case, "1F1B", range(4), recompute=tuple("abcd"))


@pytest.mark.parametrize("kind", ["1F1B", "ZBVZeroBubble"])
def test_what_is_recomputed_begins_with_its_buffers_as_they_were(kind: str) -> None:
    """It counted further, and its gradients were those of another function, without a word."""
    case = Case("scaled by calls", partial(_four_of, ScaledByCalls))
    _assert_compiled_equals_eager(case, kind, SPLIT.get(kind, range(4)), recompute=tuple("abc"))


@pytest.mark.dear
def test_what_inductor_recomputes_begins_with_its_buffers_as_they_were() -> None:
    """Inductor divides the graph into forward and backward by itself, and began with what was written."""
    model = nn.Sequential(ScaledByCalls(), ScaledByCalls())
    again = tuple(name for name, _ in model.named_children())
    x = torch.randn(2, WIDTH)
    pipe = pipeline(copy.deepcopy(model), (x,), stages=1, compile=True, recompute=again)

    def gradients(comm: Comm) -> list[Tensor | None]:
        stage = pipe.build_stage(0, comm=comm)
        Schedule1F1B(stage, 1, lambda output, _: output.sum()).step(x, target=x)
        return [parameter.grad for parameter in stage.module.parameters()]

    (actual,) = InProcessWorld(1).run(gradients)
    model(x).sum().backward()
    torch.testing.assert_close(actual, [parameter.grad for parameter in model.parameters()])


def test_what_weights_need_is_recomputed_without_the_autocast_around_the_step() -> None:
    """Attention with dropout is computed in full precision, also under autocast. W, which AOTAutograd does
    not run, computed it again in bfloat16.
    """

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            heads = x.view(-1, 1, 2, WIDTH // 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
            return x + self.layer(mixed.view(-1, WIDTH))

    args, _, target = PLAIN.data(8)
    model = nn.Sequential(*(Attention() for _ in range(4)))

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)

    with torch.autocast("cpu", torch.bfloat16):
        pipe = pipeline(
            model, (args[0][:2],), split_spec={"1": SplitPoint.END}, compile="aot_eager", recompute=["*"]
        )
        whole = copy.deepcopy(model)
        UncutReference(whole, 4, loss_of, graph=pipe.whole).step(*args, target=target)
    expected = dict(whole.named_parameters())

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        with torch.autocast("cpu", torch.bfloat16):
            get_schedule_class("ZBH1")(stage, 4, loss_of).step(
                *(args if stage.is_first else ()), target=target
            )
        for name, parameter in stage.module.named_parameters():
            assert_equal(parameter.grad, expected[name].grad, name)

    InProcessWorld(2).run(body)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Functions(_Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(_Scaled.apply(self.c(self.b(self.a(x)).relu()), 0.5).tanh())


@torch.library.custom_op("partita_test_compiled::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


@torch.library.custom_op("partita_test_compiled::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


for _operator in (thrice, twice):
    _operator.register_fake(torch.empty_like)
thrice.register_autograd(lambda _, gradient: thrice(gradient))


class Operators(_Four):
    """One with a backward formula, and one without."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(thrice(self.c(self.b(self.a(x)).relu()))) + twice(x)


class Lora(_Four):
    """Frozen layers, each with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ModuleDict({name: nn.Linear(WIDTH, 2, bias=False) for name in "abcd"})
        self.up = nn.ModuleDict({name: nn.Linear(2, WIDTH, bias=False) for name in "abcd"})

    def forward(self, x: Tensor) -> Tensor:
        for name in "abcd":
            x = torch.relu(self.get_submodule(name)(x) + self.up[name](self.down[name](x)))
        return x


class Convolutions(_Four):
    def __init__(self) -> None:
        super().__init__(
            a=nn.Conv2d(3, WIDTH, 3, padding=1),
            b=nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()),
            c=nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3), nn.GroupNorm(2, WIDTH), nn.ReLU(inplace=True)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))).mean((2, 3)))


class Tokens(nn.Module):
    """Patches, normed and laid out as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.patch(x)).flatten(2).transpose(1, 2)


class Transposed(_Four):
    """The gradient of the first stage's output arrives in another layout than the output has. It was copied
    into the output's, and the normalisation's backward pass added up in another order.
    """

    def __init__(self) -> None:
        super().__init__(a=Tokens())

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).relu()).mean(1))


class Reused(_Four):
    """A value and a parameter that several stages use, each of them several times: of their gradients the
    order of three or more addends is seen in the last bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        memory = self.a(x)
        h = self.b(memory).sigmoid() * memory + memory.tanh()
        h = functional.linear(functional.linear(h, self.a.weight), self.a.weight.t())
        h = self.c(h + memory)
        return self.d(h * memory + memory.sin()) + functional.linear(memory.cos(), self.a.weight)


class Counts(_Four):
    """How many elements the open batch has, as an embedding bag asks for its offsets. Its stage ran
    uncompiled: "torch.* op returned non-Tensor".
    """

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).relu()
        return self.d(self.c(h) / x.numel()) * h.numel()


class Branches(_Four):
    """What the host reads from a mask decides the way; each way is compiled."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if not mask.all():
            h = h.masked_fill(~mask, 0.0)
        return self.d(self.c(h).relu())


class PartOfLoss(_Four):
    """Two outputs of the last stage, of which the loss uses the one that does not need the stage before."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.b(self.a(x))
        late = self.c(early)
        return self.d(early), late.relu() @ self.d.weight

    @staticmethod
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss(output[0], target)


def _mask(samples: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any], Tensor]:
    mask = torch.ones(samples, WIDTH, dtype=torch.bool)
    mask[: samples // 2, 0] = False  # the microbatches of a batch go either way
    return (torch.randn(samples, WIDTH), mask), {}, torch.randn(samples, WIDTH)


def _images(samples: int) -> tuple[tuple[Tensor], dict[str, Any], Tensor]:
    return (torch.randn(samples, 3, 6, 6),), {}, torch.randn(samples, WIDTH)


@pytest.mark.parametrize(
    "case",
    [
        Case("functions", Functions),
        Case("operators", Operators),
        Case("lora", Lora),
        Case("convolutions", Convolutions, batch=_images),
        Case("transposed", Transposed, batch=_images),
        Case("reused", Reused),
        Case("counts", Counts),
        Case("branches", Branches, batch=_mask),
    ],
    ids=lambda case: case.name,
)
def test_what_models_are_made_of(case: Case) -> None:
    _assert_compiled_equals_eager(case, "ZBVZeroBubble", SPLIT["ZBVZeroBubble"])


class BranchesInBlocks(nn.Module):
    """Each block reads what decides its way, and has a part that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in (self.a, self.b, self.c, self.d):
            if not mask.all():
                x = x.masked_fill(~mask, 0.0)
            x = x + block(x).relu()
        return x


def test_branches_outside_of_what_is_recomputed() -> None:
    """The stage ran uncompiled: the host's read was in a part of the graph of its own."""
    case = Case("branches in blocks", BranchesInBlocks, batch=_mask)
    _assert_compiled_equals_eager(case, "ZBVZeroBubble", SPLIT["ZBVZeroBubble"], recompute=tuple("abcd"))


class BranchesWithin(nn.Module):
    """What is recomputed reads what decides its way, of an argument, and is what its stage begins with."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, BranchingBlock())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in (self.a, self.b, self.c, self.d):
            x = block(x, mask)
        return x


class BranchingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branching, self.last = BranchingLinear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.last(self.branching(x, mask))


class BranchingLinear(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        h = functional.dropout(super().forward(x), 0.5, self.training)
        h = h.masked_fill(~mask, 0.0) if not mask.all() else h.sin()
        return h.cos() if mask.logical_not().any() else h.relu()


def test_branches_within_what_is_recomputed() -> None:
    """The stage ran uncompiled: a compiler can't trace what the host reads in the middle of a graph."""
    case = Case("branches within", BranchesWithin, batch=_mask)
    _assert_compiled_equals_eager(case, "ZBVZeroBubble", SPLIT["ZBVZeroBubble"], recompute=("*.branching",))


def test_values_between_stages_without_a_gradient() -> None:
    """A stage's backward pass met a ``None`` where it expected the gradient of an input."""
    _assert_compiled_equals_eager(Case("part of the loss", PartOfLoss, loss=PartOfLoss.loss), "1F1B")


def test_w_computes_the_gradients_of_weights_and_keeps_what_it_needs_for_them_only() -> None:
    """A compiled stage's backward pass is no opaque node whose W is empty."""
    stage = cut(PLAIN, 4, compile="aot_eager").build_stage(
        1, comm=InProcessWorld(1).run(lambda comm: comm)[0]
    )
    (name,), (output,) = stage.border.inputs, stage.border.outputs
    value = torch.randn(2, WIDTH, requires_grad=True)
    results = stage.forward(0, {name: value}, train=True)
    seed = torch.randn_like(results[output])
    sent = stage.backward_input(0, {output: seed})
    assert all(parameter.grad is None for parameter in stage.module.parameters())
    stage.backward_weight(0)
    weight, bias = stage.module.get_parameter("b.weight"), stage.module.get_parameter("b.bias")
    assert_equal(sent[name], seed @ weight)
    assert_equal(weight.grad, seed.T @ value)
    assert_equal(bias.grad, seed.sum(0))


def test_no_pass_of_a_compiled_stage_runs_with_autograd_on() -> None:
    """W is called by us, not by autograd. What Inductor makes of a product with a stage's own input writes to
    ``out=``, which autograd refuses.
    """
    modes: list[bool] = []

    def watched(gm: GraphModule, _: Sequence[Any]) -> Any:
        def run(values: list[Any]) -> Any:
            modes.append(torch.is_grad_enabled())
            with torch.no_grad():
                return gm(*values)

        run._boxed_call = True  # type: ignore[attr-defined]  # as what Inductor makes is marked
        return run

    pipe = cut(PLAIN, 4, compile=watched)
    records = piped(pipe, PLAIN, get_schedule_class("ZBVZeroBubble"), 4, SPLIT["ZBVZeroBubble"])
    assert_same(records, uncut(PLAIN))
    assert len(modes) >= 4 * 4 * 3  # F, I, W of four microbatches in four stages
    assert not any(modes)


class Masked(nn.Module):
    """What Inductor would fuse stands before and behind a random call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        h = functional.dropout(self.norm(self.embedding(tokens)), 0.0, self.training)
        return self.b(self.a(h * (tokens < 19).all()).masked_fill((tokens == 3)[..., None], 0.0))


def _tokens(samples: int) -> tuple[tuple[Tensor], dict[str, Any], Tensor]:
    return (torch.randint(0, 20, (samples, 6)),), {}, torch.randn(samples, 6, WIDTH)


MASKED = Case("masked", Masked, ("a",), batch=_tokens)


@pytest.mark.parametrize(
    ("case", "kind", "placement"),
    [(PLAIN, "ZBVZeroBubble", SPLIT["ZBVZeroBubble"]), (MASKED, "1F1B", None)],
    ids=["ZBV", "across a random call"],
)
def test_inductor(case: Case, kind: str, placement: Sequence[int] | None) -> None:
    stages = 2 if placement is None else len(placement)
    pipe, expected = cut(case, stages, compile=True), uncut(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        records = piped(pipe, case, get_schedule_class(kind), 4, placement)
    for record in records:
        for name, gradient in record.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name])
    assert {name for record in records for name in record.gradients} == expected.gradients.keys()


def test_other_batch_sizes() -> None:
    pipe, model = cut(PLAIN, 2, compile="aot_eager"), PLAIN.model()

    def body(comm: Comm) -> list[dict[str, Tensor]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        gradients = []
        for samples in (8, 20, 12):
            args, _, target = PLAIN.data(samples)
            get_schedule_class("1F1B")(stage, 4, PLAIN.loss).step(*args, target=target)
            gradients.append({name: p.grad for name, p in stage.module.named_parameters()})
            stage.module.zero_grad()
        return gradients

    ranks = InProcessWorld(2).run(body)
    for number, samples in enumerate((8, 20, 12)):
        args, _, target = PLAIN.data(samples)
        model.zero_grad()
        for x, y in zip(args[0].chunk(4), target.chunk(4), strict=True):
            (PLAIN.loss(model(x), y) / 4).backward()
        for rank in ranks:
            for name, gradient in rank[number].items():
                assert torch.equal(gradient, model.get_parameter(name).grad), (samples, name)


def test_a_loss_with_weights_of_its_own_where_the_backward_pass_is_split() -> None:
    """I leaves its graph to W, which the loss's weight is for. Torch refused that to compiled graphs, with
    "compiled with non-empty donated buffers", though they have none.
    """
    torch.manual_seed(0)
    model, weight = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 4)
    x = torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"2": SplitPoint.BEGINNING}, compile="aot_eager")
    alone, weight_alone = copy.deepcopy((model, weight))
    for part in x.chunk(2):
        (weight_alone(alone(part)).square().mean() / 2).backward()

    def body(comm: Comm) -> None:
        stages = [pipe.build_stage(index, comm=comm) for index in range(2)]
        schedule = get_schedule_class("InterleavedZeroBubble")(
            stages, 2, lambda output, _target: weight(output).square().mean()
        )
        schedule.step(x)

    InProcessWorld(1).run(body)
    assert_equal(weight.weight.grad, weight_alone.weight.grad)
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@pytest.mark.parametrize("autocast", [False, True])
def test_modules_of_the_users_own_with_hooks_on_parameters_and_autocast_around(autocast: bool) -> None:
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    whole = nn.Sequential(*copy.deepcopy(modules))
    x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    log: list[tuple[str, float]] = []
    expected: list[tuple[str, float]] = []

    def watch(module: nn.Module, prefix: str, seen: list[tuple[str, float]]) -> None:
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda g, name=name: seen.append((prefix + name, float(g.sum()))))

    for index, module in enumerate(whole):
        watch(module, f"{index}.", expected)

    def body(comm: Comm) -> dict[str, Tensor]:
        own = [index for index, rank in enumerate(SPLIT["ZBVZeroBubble"]) if rank == comm.rank]
        stages = [PipelineStage(modules[index], index, 4, "cpu", comm=comm) for index in own]
        for stage in stages:
            watch(stage.module, f"{stage.index}.", log)
            stage.compile("aot_eager")
        schedule = get_schedule_class("ZBVZeroBubble")(stages, 4, functional.mse_loss)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            schedule.step(*((x,) if comm.rank == 0 else ()), target=target)
        return {f"{s.index}.{name}": p.grad for s in stages for name, p in s.module.named_parameters()}

    ranks = InProcessWorld(2).run(body)
    for part, answer in zip(x.chunk(4), target.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = functional.mse_loss(whole(part), answer)
        (loss / 4).backward()
    for rank in ranks:
        for name, gradient in rank.items():
            assert torch.equal(gradient, whole.get_parameter(name).grad), name
    assert sorted(log) == sorted(expected)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_data_parallel_stages_compiled_before_they_are_wrapped_or_afterwards(wrap: Any) -> None:
    """``fully_shard`` does all in I; ``DistributedDataParallel`` reduces in the last W."""
    records = {}
    for when in ("never", "before", "afterwards"):

        def body(comm: Comm, when: str = when) -> Record:
            pipe = cut(PLAIN, 2)
            stages = [pipe.build_stage(index, comm=comm) for index in range(2)]
            modules, record = [stage.module for stage in stages], Record()
            for stage in stages:
                if when == "before":
                    stage.compile("aot_eager")
                stage.module = wrap(stage.module)
                if when == "afterwards":
                    stage.compile("aot_eager")
            train(get_schedule_class("InterleavedZeroBubble")(stages, 4, PLAIN.loss), modules, PLAIN, record)
            for name, value in record.state.items():
                record.state[name] = value.full_tensor() if isinstance(value, DTensor) else value
            return record

        with group_of_one():
            (records[when],) = InProcessWorld(1).run(body)
    for when in ("before", "afterwards"):
        assert_equal(records[when].losses, records["never"].losses)
        assert_equal(records[when].state, records["never"].state)


@pytest.mark.parametrize("stages_too", [False, True])
def test_a_step_within_a_compiled_function_runs_as_it_is(stages_too: bool) -> None:
    """Dynamo went into the schedule's own code, and ended in errors of its own about that."""

    def stepped(steps: Any) -> list[Tensor]:
        with group_of_one():
            pipe = cut(PLAIN, 2, compile="aot_eager" if stages_too else None)
            stages = [pipe.build_stage(index) for index in range(2)]
            schedule = get_schedule_class("Interleaved1F1B")(stages, 4, PLAIN.loss)
            weights = [weight for stage in stages for weight in stage.module.parameters()]
            optimizer = torch.optim.SGD(weights, lr=0.1)
            update = torch.compiler.disable(optimizer.step)  # compiled, it rounds otherwise in torch 2.11
            (x,), _, target = PLAIN.data(8)

            def step() -> None:
                schedule.step(x, target=target)
                update()
                optimizer.zero_grad()

            run = steps(step)
            for _ in range(3):
                run()
            schedule.close()
            return weights

    ours = stepped(lambda step: torch.compile(step, backend="eager"))
    assert_equal(ours, stepped(lambda step: step))
