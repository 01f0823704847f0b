"""F, I, W is F, B, bit for bit, for any module; and nothing is computed twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from partita._torch.autograd.engine import AsSaved, hooks_made, run_backward
from partita._torch.tensors.live_bytes import LiveBytes
from partita.errors import ExecutionError
from partita.pipelining.stages.backward import split_backward
from partita.pipelining.stages.backward.split_backward import input_pass

WIDTH = 4


class Halve(torch.autograd.Function):
    """Takes a value and a weight, and counts how often it goes back."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * 0.5

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        Halve.calls += 1
        x, w = ctx.saved_tensors
        return g * w * 0.5, (g * x * 0.5).sum(0)


@dataclass(frozen=True)
class Op:
    kind: str
    operands: tuple[int, int]
    layer: int


KINDS = (
    "linear",
    "scale",
    "norm",
    "relu",
    "write",
    "write view",
    "add",
    "multiply",
    "checkpoint",
    "offload",
    "custom",
    "transposed",
    "chunk",
    "lookup",
    "detach",
    "weights",
    "lstm",
    "hook",
    "weight hook",
    "no_grad",
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[Op, ...], tuple[int, ...], tuple[bool, ...]]:
    count = draw(st.integers(1, 9))
    ops = []
    for position in range(count):
        operand = st.integers(max(0, position - 1), position + 1) | st.integers(0, position + 1)
        ops.append(Op(draw(st.sampled_from(KINDS)), (draw(operand), draw(operand)), draw(st.integers(0, 2))))
    results = draw(st.lists(st.integers(2, count + 1), min_size=1, max_size=3))
    frozen = tuple(draw(st.booleans()) and draw(st.booleans()) for _ in range(3))
    return tuple(ops), (count + 1, *results), frozen


class Running(nn.Module):
    """Values 0 and 1 are inputs; layers are used as often as the program says."""

    def __init__(self, ops: tuple[Op, ...], results: tuple[int, ...], frozen: tuple[bool, ...]) -> None:
        super().__init__()
        self.ops, self.results = ops, results
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        for number, is_frozen in enumerate(frozen):
            for module in (self.linears[number], self.norms[number]):
                module.requires_grad_(not is_frozen)
            self.scales[number].requires_grad_(not is_frozen)
        self.seen: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        self.turned = self.linears[0].weight.t()
        values = [x, y]
        for op in self.ops:
            values.append(self._apply(op, *(values[number] for number in op.operands)))
        return tuple(values[number] for number in self.results)

    def _apply(self, op: Op, a: Tensor, b: Tensor) -> Tensor:
        linear, scale, norm = self.linears[op.layer], self.scales[op.layer], self.norms[op.layer]
        match op.kind:
            case "linear":
                return linear(a)
            case "scale":
                return a * scale
            case "norm":
                return norm(a)
            case "relu":
                return a.relu()
            case "write":
                return (a * 1.0).mul_(scale).add_(b)
            case "write view":
                base = a * 1.0
                base[:, 0].mul_(scale[0])
                base[1].add_(scale)
                return base
            case "add":
                return a + b
            case "multiply":
                return a * b
            case "checkpoint":
                return checkpoint(lambda v: linear(v.tanh()), a, use_reentrant=False)
            case "offload":
                with torch.autograd.graph.save_on_cpu():
                    return linear(a.tanh())
            case "custom":
                return Halve.apply(a, scale)
            case "transposed":
                return a @ self.turned + b
            case "chunk":
                left, right = linear(a).chunk(2, 1)
                return torch.cat((right, left.detach()), 1)
            case "lookup":
                return self.table(a.detach().argmax(1)) + b
            case "detach":
                return a.detach() * scale + b
            case "weights":
                return (scale * scale).expand(a.shape[0], -1)
            case "lstm":
                return self.cell(a, b)
            case "hook":
                output = linear(a)
                if output.requires_grad:
                    output.register_hook(lambda g: self.seen.append(g.sum().item()) or g * 0.5)
                return output
            case "weight hook":
                output = torch.tanh(linear.weight)
                if output.requires_grad:
                    output.register_hook(lambda g: self.seen.append(g.sum().item()) or g * 2)
                return a @ output + b
            case "no_grad":
                with torch.no_grad():
                    return linear(a)
        raise AssertionError(op.kind)


def run(model: nn.Module, inputs: list[Tensor], split: bool, repeats: int = 2) -> dict[str, Any]:
    """All that can be seen of some microbatches: W of all after I of all."""
    seen: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda g, name=name: seen.append((name, g.clone())))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, p.grad.clone()))
            )
    gradients: list[list[Tensor | None]] = []
    flights = []
    for number in range(repeats):
        leaves = [(value * (number + 1)).detach().requires_grad_(value.requires_grad) for value in inputs]
        before = hooks_made()
        outputs = [value for value in model(*leaves) if value.requires_grad]
        hooked = hooks_made() != before
        seeds = [torch.linspace(-1, 1, value.numel()).view_as(value) for value in outputs]
        flights.append((leaves, outputs, seeds, hooked))
    passes = []
    for leaves, outputs, seeds, hooked in flights:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if split:
            assert all(p.grad is None for p in model.parameters())
            cut = input_pass(outputs, seeds, wanted, hooked=hooked)
            gradients.append(list(cut.gradients))
            passes.append(cut.weights)
        else:
            if outputs:
                torch.autograd.backward(outputs, seeds)
            gradients.append([leaf.grad for leaf in wanted])
    for weights in passes:
        weights.run()
    return {
        "inputs": gradients,
        "parameters": {name: p.grad for name, p in model.named_parameters()},
        "hooks": sorted(seen, key=lambda item: (item[0], item[1].flatten().tolist())),
        "activations": sorted(getattr(model, "seen", [])),
    }


def same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(actual, Tensor) and torch.equal(actual, expected)
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same(actual[k], expected[k]) for k in expected)
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return actual == expected


@settings(max_examples=200, deadline=None)
@given(
    programs(),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([2**20, 2**20, 100, 0]),
    st.sampled_from([False, False, True]),
)
def test_input_and_weight_passes_equal_the_whole_pass(
    program: Any, wants: tuple[bool, bool], together: int, checked: bool
) -> None:
    """Whether W runs nodes together, a few at a time, or one by one; and with what the engine checks."""
    torch.manual_seed(0)
    model = Running(*program)
    inputs = [torch.randn(3, WIDTH, requires_grad=want) for want in wants]
    other = copy.deepcopy(model)
    expected = run(other, inputs, split=False)
    with (
        patch.object(split_backward, "WEIGHTS_TOGETHER_BYTES", together),
        patch.object(torch, "is_anomaly_enabled", lambda: checked),
    ):
        actual = run(model, inputs, split=True)
    assert same(actual, expected), (actual, expected)


def test_small_weights_are_run_together_and_large_ones_one_by_one() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    runs: list[int] = []

    def counted(roots: Any, *args: Any, **options: Any) -> Any:
        runs.append(len(roots))
        return run_backward(roots, *args, **options)

    def weights() -> Any:
        x = torch.randn(4, 8, requires_grad=True)
        output = model(x)
        return input_pass([output], [torch.ones_like(output)], [x]).weights

    first, second = weights(), weights()
    with patch.object(split_backward, "run_backward", counted):
        first.run()
        assert runs == [8], "the weight and the bias of each of four layers"
        with patch.object(split_backward, "WEIGHTS_TOGETHER_BYTES", 2 * 9 * 8 * 4 - 1):
            second.run()
    assert runs == [8, 2, 2, 2, 2]


# --- nothing is computed twice, and each half computes its own ---


class Counted(TorchDispatchMode):
    """Counts the operators that compute; views and copies cost nothing that matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Twice(nn.Module):
    """A shared layer and a shared normalisation, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.norm(self.linear(x)).relu()))


def _counts(model: nn.Module, x: Tensor) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """The operators of B, of I and of W."""
    output = model(x)
    with Counted() as whole:
        torch.autograd.backward(output, torch.ones_like(output))
    output = model(x)
    with Counted() as first:
        weights = input_pass([output], [torch.ones_like(output)], [x]).weights
    with Counted() as second:
        weights.run()
    return whole.counts, first.counts, second.counts


def test_a_linear_layers_two_products_are_computed_once_each_in_their_own_half() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    whole, first, second = _counts(model, torch.randn(4, 8, requires_grad=True))
    assert whole["aten.mm"] == 4
    assert first["aten.mm"] == second["aten.mm"] == 2
    assert first["aten.threshold_backward"] == 1
    assert second["aten.threshold_backward"] == 0


@pytest.mark.parametrize("make", [block, Twice], ids=["transformer", "shared layers"])
def test_the_halves_run_what_the_whole_runs(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    whole, first, second = _counts(make(), torch.randn(2, 5, 8, requires_grad=True))
    for name in ("aten.mm", "aten.bmm", "aten.threshold_backward"):
        assert first[name] + second[name] == whole[name], name
    assert second["aten.mm"] == whole["aten.mm"] // 2  # the weights' half, shared or not


class Latents(nn.Module):
    """Attention whose queries are parameters: those of the keys and values go back in I."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.mix = nn.Parameter(torch.randn(1, 2, 4, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.mix(x).unflatten(0, (1, 2, -1))
        return nn.functional.scaled_dot_product_attention(self.queries, keys, keys)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.PReLU(), nn.Linear(8, 8)),
        Latents,
        Recurrent,
    ],
    ids=["batch norm", "attention", "recurrent"],
)
def test_kernels_that_compute_all_gradients_at_once_run_once(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    whole, first, second = _counts(make(), torch.randn(6, 8, requires_grad=True))
    kernels = {name for name in whole if name.endswith("backward")}
    assert kernels
    for name in kernels:
        assert (first[name], second[name]) == (whole[name], 0), name


def test_a_checkpointed_region_is_computed_again_once() -> None:
    model, calls = nn.Linear(WIDTH, WIDTH), []

    def region(x: Tensor) -> Tensor:
        calls.append(1)
        return model(x.tanh()).tanh()

    x = torch.randn(3, WIDTH, requires_grad=True)
    output = checkpoint(region, x, use_reentrant=False)
    weights = input_pass([output], [torch.ones_like(output)], [x]).weights
    assert model.weight.grad is None
    weights.run()
    assert len(calls) == 2
    assert model.weight.grad is not None


def test_a_checkpointed_region_whose_nodes_save_nothing_is_computed_again_once() -> None:
    """What a node had saved as None in an earlier step was asked for in later ones by unpacking it: which
    computes a checkpoint again.
    """
    model, calls = nn.Linear(WIDTH, WIDTH), []

    def region(x: Tensor) -> Tensor:
        calls.append(1)
        return (x * 2).relu()

    for _ in range(3):
        calls.clear()
        x = torch.randn(3, WIDTH, requires_grad=True)
        output = model(checkpoint(region, x, use_reentrant=False)) * torch.rand(WIDTH)
        input_pass([output], [torch.ones_like(output)], [x]).weights.run()
        assert len(calls) == 2


def test_a_custom_function_goes_back_once() -> None:
    Halve.calls = 0
    weight = nn.Parameter(torch.randn(WIDTH))
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = Halve.apply(x, weight)
    weights = input_pass([output], [torch.ones_like(output)], [x]).weights
    assert weight.grad is None
    weights.run()
    assert Halve.calls == 1
    assert torch.equal(weight.grad, (x * 0.5).sum(0))


def test_a_reentrant_checkpoint_goes_back_whole_in_the_first_half() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = checkpoint(model, x, use_reentrant=True)
    cut = input_pass([output], [torch.ones_like(output)], [x])
    assert cut.weights.is_empty
    assert torch.equal(cut.gradients[0], torch.ones(3, WIDTH) @ model.weight)
    assert torch.equal(model.bias.grad, torch.full((WIDTH,), 3.0))


def test_without_inputs_that_want_gradients_the_first_half_computes_nothing() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    output = model(torch.randn(3, WIDTH))
    ones = torch.ones_like(output)
    with Counted() as first:
        weights = input_pass([output], [ones], []).weights
    assert not first.counts
    weights.run()
    assert torch.equal(model.bias.grad, torch.full((WIDTH,), 3.0))


def test_a_frozen_module_leaves_nothing_for_the_second_half() -> None:
    model = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = model(x)
    cut = input_pass([output], [torch.ones_like(output)], [x])
    assert cut.weights.is_empty
    assert torch.equal(cut.gradients[0], torch.ones(3, WIDTH) @ model.weight)


def test_a_share_that_is_asked_for_is_returned_and_not_accumulated() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    weight.grad = torch.ones(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = (x @ weight).tanh() @ weight
    whole = torch.autograd.grad(output.sum(), [x, weight], retain_graph=True)
    share = torch.randn(WIDTH, WIDTH)
    cut = input_pass([output, weight], [torch.ones_like(output), share], [x], [weight])
    cut.weights.run()
    assert torch.equal(cut.gradients[0], whole[0])
    torch.testing.assert_close(cut.shares[0], whole[1] + share)
    assert torch.equal(weight.grad, torch.ones(WIDTH, WIDTH))


def test_hooks_on_the_nodes_that_accumulate_run_once_as_data_parallel_wrappers_need_it() -> None:
    model, seen = Twice(), []
    nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    handles = [
        node.register_hook(lambda *_, number=number: seen.append(number)) for number, node in enumerate(nodes)
    ]
    x = torch.randn(2, 8, requires_grad=True)
    output = model(x)
    weights = input_pass([output], [torch.ones_like(output)], [x]).weights
    assert seen == []
    weights.run()
    assert sorted(seen) == list(range(len(handles)))


def test_a_weight_that_many_layers_share_adds_up_in_the_order_of_the_whole_pass() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8) / 8)
    x = torch.randn(5, 8, requires_grad=True)

    def forward() -> Tensor:
        h = x
        for _ in range(6):
            h = torch.tanh(torch.nn.functional.linear(h, weight))
        return h

    output = forward()
    torch.autograd.backward(output, torch.ones_like(output))
    expected, weight.grad = weight.grad, None
    output = forward()
    with Counted() as first:
        weights = input_pass([output], [torch.ones_like(output)], [x]).weights
    weights.run()
    assert first.counts["aten.mm"] == 6  # no gradient of the weight among them
    assert torch.equal(weight.grad, expected)


def test_a_group_normalisation_of_channels_last_goes_back() -> None:
    """torch ends the process where it is asked for the gradients of the weights alone."""
    norm = nn.GroupNorm(2, 4)
    whole = copy.deepcopy(norm)
    x = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    out, expected = norm(x), whole(x)
    seed = torch.randn_like(out)
    expected.backward(seed)
    cut = input_pass([out], [seed], [x])
    assert norm.weight.grad is None
    cut.weights.run()
    assert torch.equal(cut.gradients[0], x.grad)
    for parameter, other in zip(norm.parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def _forgetful() -> nn.Sequential:
    """The input pass needs what the activations save; the weight pass the inputs of the linear layers."""
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Softmax(-1), nn.Tanh(), nn.Linear(64, 8), nn.GELU())


def _bytes_around_the_input_pass(run: Callable[[nn.Module, Tensor], Tensor]) -> tuple[int, int]:
    """What lives between F and I, and between I and W, of what these made; checks the gradients too."""
    torch.manual_seed(0)
    model, x = _forgetful(), torch.randn(16, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    with LiveBytes() as live:
        roots = [run(model, x)]
        before = live.now() - roots[0].nbytes
        half = input_pass(roots, [torch.ones(16, 8)], [x])
        roots.clear()
        (gradient,) = half.gradients
        assert gradient is not None
        assert torch.equal(gradient, expected[0])
        after = live.now() - gradient.nbytes
        half.weights.run()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected[1:], strict=True))
    return before, after


def _with_hooks_that_give_back(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(AsSaved.pack, AsSaved()):
        return model(x)


@pytest.mark.parametrize("run", [nn.Module.__call__, _with_hooks_that_give_back])
def test_what_only_the_input_pass_needs_is_freed_after_it(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    rows, wide, narrow = 16, 64, 8
    before, after = _bytes_around_the_input_pass(run)
    # GELU's and Softmax's input or output, Tanh's output (the second linear's input); the last GELU's input
    assert before == 4 * rows * (3 * wide + narrow)
    # Tanh's output (the model's own input is not its own), and what arrived at both linear layers
    assert after == 4 * rows * (wide + wide + narrow)


def test_the_input_pass_frees_as_it_goes() -> None:
    rows, wide = 16, 64
    layers = [
        layer for _ in range(8) for layer in (nn.GELU(), nn.Softmax(-1), nn.Tanh(), nn.Linear(wide, wide))
    ]
    model, x = nn.Sequential(*layers), torch.randn(rows, wide, requires_grad=True)
    one = 4 * rows * wide
    with LiveBytes() as live:
        roots, seeds = [model(x)], [torch.ones(rows, wide)]
        before = live.start_anew()
        half = input_pass(roots, seeds, [x])
    # a group of layers keeps 4 values; I leaves 2 of each, and a few more are under way at any time
    assert live.most <= before + 4 * one
    assert half.gradients[0] is not None


def test_a_graph_of_which_parts_were_freed_says_so() -> None:
    model, x = _forgetful(), torch.randn(2, 8, requires_grad=True)
    output = model(x)
    input_pass([output], [torch.ones_like(output)], [x])
    with pytest.raises(ExecutionError, match="go backward through a microbatch's graph once"):
        output.sum().backward()


class Scale(nn.Module):
    """As the last product of a norm or of a layer scale; or of one that a table is looked up for."""

    def __init__(self, width: int, *, expanded: bool) -> None:
        super().__init__()
        self.weight, self.expanded = nn.Parameter(torch.ones(width)), expanded

    def forward(self, x: Tensor) -> Tensor:
        normal = x / 2
        return normal * (self.weight.expand(x.shape[0], -1) if self.expanded else self.weight)


@pytest.mark.parametrize("expanded", [False, True])
def test_gradients_of_broadcast_weights_are_there_one_at_a_time(expanded: bool) -> None:
    """They are as large as activations until they are summed."""
    rows, width, count = 512, 64, 12
    model = nn.Sequential(*(Scale(width, expanded=expanded) for _ in range(count)))
    x = torch.randn(rows, width, requires_grad=True)
    one = 4 * rows * width
    with LiveBytes() as live, patch.object(split_backward, "WEIGHTS_TOGETHER_BYTES", 2 * one):
        output = model(x)
        half = input_pass([output], [torch.ones_like(output)], [x])
        before = live.start_anew()
        half.weights.run()
    assert live.most <= before + (4 if expanded else 2) * one
    assert all(scale.weight.grad is not None for scale in model)


def test_the_weight_pass_frees_what_it_needs_although_somebody_keeps_the_output() -> None:
    rows, width, count = 16, 8, 4
    model = nn.Sequential(*(Scale(width, expanded=False) for _ in range(count)))
    x = torch.randn(rows, width, requires_grad=True)
    with LiveBytes() as live:
        output = model(x)
        half = input_pass([output], [torch.ones_like(output)], [x])
        half.weights.run()
        after = live.now()
    gradients = sum(4 * width for _ in range(count)) + half.gradients[0].nbytes
    assert after <= output.nbytes + gradients
