"""``DDPOptimizer`` against torch's own, in one process: a world of one rank has all of DDP's buckets."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.group_of_one import group_of_one
from tests.own_functions import OwnFunctions
from torch import nn
from torch._dynamo.backends import distributed as theirs
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.compile_fx import compile_fx
from torch.nn.parallel import DistributedDataParallel

from partita.ddp import DDPOptimizer, use_partita_ddp_optimizer
from partita.ddp.forward_cut.buckets import group_by_caps
from partita.errors import ArgumentError

SIDE = 512
"""A square matrix of float32 of this side is 1 MiB, and torch takes no caps below that."""


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    with group_of_one():
        yield


class Seen:
    """A stand-in for the class that ``torch.compile`` takes: keeps what it makes, so that a test can look."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.instances: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.instances.append(self.kind(*args, **kwargs))
        return self.instances[-1]


@contextmanager
def optimizer(kind: Any) -> Iterator[Seen]:
    seen = Seen(kind)
    before, theirs.DDPOptimizer = theirs.DDPOptimizer, seen
    try:
        yield seen
    finally:
        theirs.DDPOptimizer = before


BOTH = {"torch": theirs.DDPOptimizer, "partita": DDPOptimizer}


def train(module: Any, make_input: Callable[[int], torch.Tensor], steps: int = 2) -> list[Any]:
    """Outputs, gradients and state after each step."""
    tensors: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        module.zero_grad()
        result = module(make_input(step))
        result.square().mean().backward()
        tensors.append(result.detach().clone())
        tensors += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        tensors += [value.clone() for value in module.state_dict().values()]
    return tensors


def equal(left: list[Any], right: list[Any]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def against_eager(kind: str, model: nn.Module) -> tuple[bool, Any]:
    """Whether training in pieces gives what eager training gives."""
    torch._dynamo.reset()
    expected = train(copy.deepcopy(model), rows)
    optimizer = BOTH[kind](2**20, lambda gm, _inputs: gm.forward, first_bucket_cap=2**20)
    actual = train(torch.compile(copy.deepcopy(model), backend=optimizer.compile_fn), rows)
    return equal(expected, actual), optimizer


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, SIDE, generator=torch.Generator().manual_seed(step))


class Towers(nn.Module):
    """A tower beside the trained one, that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))
        self.frozen = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.trained:
            x = layer(x).relu()
        with torch.no_grad():
            for layer in self.frozen:
                y = layer(y).relu()
        return x + y


class Counting(nn.Module):
    """A buffer that is read, counted up and read again, by towers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.layers[0](x)
        self.steps.add_(1)
        left = self.layers[1](left)
        right = self.layers[2](x) * self.steps.clone()
        self.steps.mul_(2)
        return left + self.layers[3](right) * self.steps.clone()


class Dropped(nn.Module):
    """Two towers that draw random numbers, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for left, right in zip(self.left, self.right, strict=True):
            x, y = self.drop(left(x)), self.drop(right(y))
        return x + y


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("model", [Towers, Counting, Dropped])
def test_pieces_do_what_the_whole_did_and_torchs_do_not(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    right, optimizer = against_eager("partita", model())
    assert right
    assert len(optimizer.buckets) > 1
    torch.manual_seed(0)
    try:
        right, _ = against_eager("torch", model())
    except RuntimeError:  # nothing of the result requires a gradient
        right = False
    assert not right


class Lazy(nn.Module):
    """Several outputs, of which a loss takes one: the backward pass of the last piece never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(SIDE, SIDE))
        self.gate = nn.Parameter(torch.randn(SIDE, SIDE))
        self.aux = nn.Parameter(torch.randn(SIDE, SIDE) / 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pred = self.scale * x * self.gate
        h = torch.mm(pred.detach(), self.aux).sin()
        with torch.no_grad():
            metric = (pred - h).abs().mean()
        return pred, h, metric


def test_backward_of_some_outputs_leaves_parameters_alone_and_torchs_does_not() -> None:
    torch.manual_seed(0)
    model = Lazy()
    x = torch.randn(SIDE, SIDE)
    changed = {}
    for kind in BOTH:
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        optimizer = BOTH[kind](2 * 2**20, compile_fx, first_bucket_cap=2**20)
        # torch's wrong code would go to a cache on disk, and come back for right requests
        with torch._inductor.config.patch(fx_graph_cache=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pred, _, _ = torch.compile(copied, backend=optimizer.compile_fn)(x)
            pred.square().mean().backward()
        assert len(optimizer.buckets) == 2
        changed[kind] = not equal(list(model.parameters()), list(copied.parameters()))
    assert changed == {"torch": True, "partita": False}


def buckets_of(kind: str, model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[list[int], list[int]]:
    """Bytes of the buckets, first one first: where graphs are cut, and what DDP reduces."""
    torch._dynamo.reset()
    with optimizer(BOTH[kind]) as seen:
        wrapped = DistributedDataParallel(copy.deepcopy(model), **options)
        run = torch.compile(wrapped, backend=lambda gm, _inputs: gm.forward)
        for _ in range(3):
            run(x).sum().backward()
    facts = wrapped.logger._get_ddp_logging_data().strs_map
    cut = [
        bucket.size
        for optimizer in reversed(seen.instances)
        for bucket in reversed(getattr(optimizer, "buckets", []))
    ]
    return cut, [int(size) for size in facts["rebuilt_bucket_sizes"].split(",")]


def square(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(SIDE, SIDE, bias=False, dtype=dtype)


class Interrupted(Stack):
    """A graph break between two halves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            x = layer(x)
        torch._dynamo.graph_break()
        for layer in self.layers[half:]:
            x = layer(x)
        return x


class Casting(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


class Repeated(Stack):
    """One layer many times, after another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for _ in range(6):
            x = self.layers[1](x).relu()
        return x


MIB = 2**20


# Dynamo itself looks at .grad of what a graph break passes on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("model", "options", "reduced", "torchs"),
    [
        (Stack([square() for _ in range(8)]), {"bucket_cap_mb": 4}, [4, 4], [1, 4, 3]),
        (Interrupted([square() for _ in range(8)]), {"bucket_cap_mb": 4}, [4, 4], [1, 3, 1, 3]),
        (Stack([square() for _ in range(6)]), {"bucket_cap_mb_list": [2, 1, 3]}, [2, 1, 3], None),
        (Stack([square() for _ in range(3)]), {}, [1, 2], [1, 2]),
    ],
)
def test_cuts_are_at_the_buckets_that_ddp_reduces(
    model: nn.Module, options: dict[str, Any], reduced: list[int], torchs: list[int] | None
) -> None:
    x = torch.randn(2, SIDE)
    cut, in_reducer = buckets_of("partita", model, x, **options)
    assert [size // MIB for size in cut] == [size // MIB for size in in_reducer] == reduced
    cut, in_reducer = buckets_of("torch", model, x, **options)
    assert [size // MIB for size in in_reducer] == reduced
    if torchs is not None:
        assert [size // MIB for size in cut] == torchs
    else:
        assert [size // MIB for size in cut] != reduced


def test_each_data_type_fills_its_own_buckets() -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.float64]
    model = Casting([square(kind) for kind in kinds])
    cut, reduced = buckets_of("partita", model, torch.randn(2, SIDE), bucket_cap_mb=2)
    assert sum(cut) == sum(reduced)
    assert sorted(size // MIB for size in reduced) == [2, 2, 2]
    # 64-bit layers fill a bucket each; the two 32-bit ones share one that is full where the first is
    assert [size // MIB for size in cut] == [2, 1, 2, 1] or [size // MIB for size in cut] == [2, 3, 1]


def test_a_parameter_that_is_used_often_counts_once() -> None:
    model = Repeated([square(), square()])
    cut, reduced = buckets_of("partita", model, torch.randn(2, SIDE), bucket_cap_mb=1)
    assert cut == reduced == [MIB, MIB]
    cut, _ = buckets_of("torch", model, torch.randn(2, SIDE), bucket_cap_mb=1)
    assert len(cut) > 2


def test_parameters_that_are_views_count_their_own_bytes() -> None:
    model = Stack([square() for _ in range(4)])
    flat = torch.randn(4, SIDE, SIDE)
    for layer, part in zip(model.layers, flat, strict=True):
        layer.weight = nn.Parameter(part)
    cut, reduced = buckets_of("partita", model, torch.randn(2, SIDE), bucket_cap_mb=4)
    assert cut == reduced == [4 * MIB]
    optimizer = theirs.DDPOptimizer(4 * MIB, lambda gm, _inputs: gm.forward, first_bucket_cap=4 * MIB)
    torch.compile(model, backend=optimizer.compile_fn)(torch.randn(2, SIDE))
    assert optimizer.buckets[0].size >= 4 * MIB
    assert len(optimizer.buckets) > 1


def test_caps_below_one_mebibyte_are_fine() -> None:
    model = Stack([nn.Linear(16, 16, bias=False) for _ in range(4)])
    cut, reduced = buckets_of("partita", model, torch.randn(2, 16), bucket_cap_mb=0.002)
    assert cut == reduced == [3 * 1024, 1024]
    with pytest.raises(Exception, match="First bucket should be smaller"):
        buckets_of("torch", model, torch.randn(2, 16), bucket_cap_mb=0.002)


def test_ignored_parameters_and_buffers_do_not_count() -> None:
    model = Stack([square() for _ in range(3)])
    model.register_buffer("table", torch.zeros(SIDE, SIDE))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.1.weight"])
    cut, reduced = buckets_of("partita", model, torch.randn(2, SIDE), bucket_cap_mb=1)
    assert cut == reduced == [MIB, MIB]


def test_equal_pieces_are_compiled_once() -> None:
    calls = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls.append(gm)
        return gm.forward

    torch.manual_seed(0)
    model = Stack([nn.Sequential(square(), nn.GELU()) for _ in range(12)])
    expected = train(copy.deepcopy(model), rows)
    optimizer = DDPOptimizer(MIB, backend, first_bucket_cap=MIB)
    actual = train(torch.compile(model, backend=optimizer.compile_fn), rows)
    assert equal(expected, actual)
    assert len(optimizer.buckets) == 12
    assert optimizer.compiled == len(calls) <= 3


def test_a_piece_that_the_backend_refuses_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls.append(gm)
        if any(node.op == "call_method" and node.target == "cos" for node in gm.graph.nodes):
            raise ValueError("no cosine today")
        return gm.forward

    class Waves(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x).sin()).cos()).sin()

    torch.manual_seed(0)
    model = Waves([square() for _ in range(3)])
    expected = train(copy.deepcopy(model), rows)
    optimizer = DDPOptimizer(MIB, backend, first_bucket_cap=MIB)
    with caplog.at_level(logging.WARNING, "partita.ddp"):
        actual = train(torch.compile(model, backend=optimizer.compile_fn), rows)
    assert equal(expected, actual)
    assert "no cosine today" in caplog.text
    assert len(calls) == 3
    assert optimizer.compiled == 2


def test_pieces_are_compiled_with_the_strides_that_they_get() -> None:
    strides = []

    def backend(gm: Any, inputs: Any) -> Any:
        strides.append([tuple(value.stride()) for value in inputs if isinstance(value, torch.Tensor)])

        def run(*args: Any) -> Any:
            assert [tuple(a.stride()) for a in args if isinstance(a, torch.Tensor)] in strides
            return gm(*args)

        return run

    class Turned(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x).t().contiguous().t())

    model = Turned([square(), square()])
    optimizer = DDPOptimizer(MIB, backend, first_bucket_cap=MIB)
    torch.compile(model, backend=optimizer.compile_fn)(torch.randn(3, SIDE)).sum().backward()
    assert len(strides) == 2


def test_small_graphs_are_compiled_whole() -> None:
    optimizer = DDPOptimizer(MIB, lambda gm, _inputs: gm.forward)
    model = Stack([nn.Linear(4, 4)])
    torch.compile(model, backend=optimizer.compile_fn)(torch.randn(2, 4))
    assert len(optimizer.buckets) == 1
    assert optimizer.compiled == 1


def test_a_cap_below_one_byte_and_a_backend_by_name_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'aot_eager': give a function .*lookup_backend"):
        DDPOptimizer(1, "aot_eager")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="bucket_bytes_cap is 0: give at least 1 byte"):
        DDPOptimizer(0, lambda gm, _inputs: gm.forward)


def test_torch_compile_uses_it_within_the_block_only() -> None:
    with use_partita_ddp_optimizer():
        assert theirs.DDPOptimizer is DDPOptimizer
    assert theirs.DDPOptimizer is BOTH["torch"]


def test_dynamic_sizes_cross_the_cuts() -> None:
    torch.manual_seed(0)
    model = Stack([square(), nn.GELU(), square()])
    optimizer = DDPOptimizer(MIB, lambda gm, _inputs: gm.forward, first_bucket_cap=MIB)
    run = torch.compile(copy.deepcopy(model), backend=optimizer.compile_fn, dynamic=True)
    for count in (3, 5, 4):
        x = torch.randn(count, SIDE)
        assert torch.equal(run(x), model(x))
    assert len(optimizer.buckets) == 2


class Scaled(nn.Module):
    """Scales between its layers by a float of its caller's, and adds an integer that follows from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))

    def forward(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        kept, steps = 1 - rate, int(rate * 8)
        for layer in self.layers:
            x = x + layer(x) * kept + steps
        return x / kept


def test_each_piece_reads_floats_that_change_and_torchs_can_not_be_compiled() -> None:
    model = Scaled()

    def compiled(kind: str) -> tuple[Any, nn.Module]:
        optimizer = BOTH[kind](MIB, aot_eager, first_bucket_cap=MIB)
        return optimizer, torch.compile(copy.deepcopy(model), backend=optimizer.compile_fn, fullgraph=True)

    optimizer, run = compiled("partita")
    for step, rate in enumerate((0.1, 0.25, 0.5)):
        for module in (model, run):
            module.zero_grad()
            module(rows(step), rate).square().mean().backward()
        gradients = [[parameter.grad for parameter in module.parameters()] for module in (run, model)]
        assert equal(*gradients)
    # the last graph is of any rate; torch 2.11 makes it one step earlier
    assert optimizer.compiled == (2 if torch.__version__.startswith("2.11.") else 3)
    torch._dynamo.reset()
    _, run = compiled("torch")
    run(rows(0), 0.1)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="'float' object has no attribute"):
        run(rows(0), 0.25)


def test_groups_are_those_of_ddp_for_each_kind() -> None:
    assert group_by_caps([1, 1, 1, 1], ["a"] * 4, [1, 2]) == [[0], [1, 2], [3]]
    assert group_by_caps([2, 1, 2, 1], ["a", "b", "a", "b"], [2]) == [[0], [1, 3], [2]]
    assert group_by_caps([], [], [5]) == []


def test_graphs_that_no_gradient_flows_through_are_not_cut() -> None:
    model = Stack([square() for _ in range(3)])
    optimizer = DDPOptimizer(MIB, lambda gm, _inputs: gm.forward, first_bucket_cap=MIB)
    run = torch.compile(model, backend=optimizer.compile_fn)
    with torch.no_grad():
        run(torch.randn(2, SIDE))
    assert optimizer.compiled == 1
    run(torch.randn(2, SIDE)).sum().backward()
    assert len(optimizer.buckets) == 3
    assert optimizer.compiled == 2
    run(torch.randn(2, SIDE, requires_grad=True)).sum().backward()
    model.requires_grad_(False)
    run(torch.randn(2, SIDE))
    # Dynamo of torch 2.11 compiles its graph once more, since the parameters are other ones to it
    assert optimizer.compiled == (2 if torch.__version__.startswith("2.11.") else 1)


def test_explain_names_the_cuts() -> None:
    torch._dynamo.reset()
    with use_partita_ddp_optimizer():
        wrapped = DistributedDataParallel(Stack([square(), nn.GELU(), square()]), bucket_cap_mb=1)
        explained = torch._dynamo.explain(wrapped)(torch.randn(2, SIDE))
    assert explained.graph_count == 2
    reasons = [reason.reason for reason in explained.break_reasons]
    assert "layers_modules_0_parameters_weight_ (torch._dynamo.config.optimize_ddp" in reasons[0]
    assert "layers_modules_2_parameters_weight_ (torch._dynamo.config.optimize_ddp" in reasons[1]
    assert {reason.user_stack[-1].name for reason in explained.break_reasons} == {"forward"}


def test_functions_of_the_users_own_keep_their_backward_passes() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = OwnFunctions(8)

    def make_input(step: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))

    expected = train(copy.deepcopy(model), make_input)
    optimizer = DDPOptimizer(1, aot_eager, first_bucket_cap=1)
    actual = train(torch.compile(copy.deepcopy(model), backend=optimizer.compile_fn), make_input)
    assert equal(expected, actual)
    assert optimizer.compiled >= 4
