from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pipelining.models import IN_PLACE, TRANSFORMER, WIDTH
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor

import partita
from partita._torch.operators.roofline import FixedSpeeds
from partita._torch.tensors.live_bytes import LiveBytes
from partita.errors import ArgumentError, CaptureError, NotProven, PlanError
from partita.graph.liveness import borders
from partita.pipelining import SplitPoint, measure_units, pipeline
from partita.pipelining.frontends.graph.units.costs import _window_minima, cost_model, narrow_borders
from partita.planning import Cluster, CostModel, plan_stages, simulate
from partita.planning.costs.recompute import recomputed_cost
from partita.planning.generators.plan_schedule import schedule_of
from partita.runtime import Comm


def test_a_transformer_is_cut_between_its_blocks() -> None:
    model = TRANSFORMER.model()
    costs = measure_units(model, TRANSFORMER.data(2)[0])
    assert len(costs.crossing_bytes) == len(costs.units) - 1
    assert set(costs.crossing_bytes) == {2 * 6 * WIDTH * 4}  # one activation, never more
    modules = [module for unit in costs.units for module in unit.modules]
    assert {"embedding", "blocks.0.mix", "blocks.2.feed.3", "norm", "head"} <= set(modules)


def test_units_add_up_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    costs = measure_units(model, (torch.randn(3, 4),))
    assert sum(unit.parameters for unit in costs.units) == sum(p.numel() for p in model.parameters())
    assert sum(unit.parameter_bytes for unit in costs.units) == 4 * sum(p.numel() for p in model.parameters())
    assert costs.crossing_bytes == (3 * 6 * 4, 3 * 6 * 4)
    assert all(unit.forward_s > 0.0 for unit in costs.units)
    assert [unit.name for unit in costs.units] == ["0:linear", "1:relu", "2:linear"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


def test_a_tied_parameter_is_counted_once_in_a_stage_and_a_plan_with_it_runs() -> None:
    model, tokens = Tied(), torch.arange(6).reshape(2, 3)
    costs = measure_units(model, (tokens,))
    assert [(tied.units, tied.parameters) for tied in costs.tied] == [((0, len(costs.units) - 1), 28)]
    assert costs.parameters(0, len(costs.units) - 1) == sum(p.numel() for p in model.parameters())
    for stages, holders in ((1, 1), (2, 2)):
        plan = plan_stages(costs, stages=stages)
        pipe = pipeline(model, (tokens,), plan=plan)
        assert sum(stage.parameters for stage in plan.stages) == 20 + 28 * holders
        assert pipe.num_stages == stages


def test_the_gradient_of_a_tied_parameter_counts_where_it_is_trained() -> None:
    model, tokens = Tied(), torch.arange(6).reshape(2, 3)
    assert [tied.gradient_bytes for tied in measure_units(model, (tokens,)).tied] == [112]
    model.head.weight.requires_grad_(False)
    assert [tied.gradient_bytes for tied in measure_units(model, (tokens,)).tied] == [0]


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _held_and_planned(comm: Comm) -> tuple[int, int]:
    """What tensors hold at most in a step beyond parameters and gradients, and what was planned for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 500, bias=False))
    model[3].weight = model[0].weight
    tokens = torch.arange(16).reshape(2, 8)
    measured = measure_units(model, (tokens,), loss_fn=_loss, target=tokens)
    costs = CostModel.from_json(comm.all_gather_object(measured.to_json())[0])
    plan = plan_stages(costs, stages=2, schedule="1F1B", microbatches=8)
    pipe = pipeline(model, (tokens,), plan=plan)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    schedule = pipe.schedule(_loss, comm=comm)
    batch = torch.cat([tokens] * 8)
    schedule.step(batch, target=batch, return_outputs=False)
    with LiveBytes() as live:
        schedule.step(batch, target=batch, return_outputs=False)
    schedule.close()
    stages = [recomputed_cost(costs, one.first_unit, one.last_unit, (), 0.0) for one in plan.stages]
    return live.most, simulate(schedule_of(plan), stages, Cluster(2)).peak_bytes[comm.rank]


@pytest.mark.dear
@pytest.mark.usefixtures("alone")
def test_memory_is_as_planned_with_a_tied_parameter() -> None:
    """The gradient of a tied matrix, which travels with each microbatch, was not planned for: a tied GPT held
    up to half as much again.
    """
    for held_bytes, planned in ProcessWorld(2).run(_held_and_planned):
        assert abs(held_bytes / planned - 1.0) < 0.07


class InRegion(nn.Module):
    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 2)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            h = self.layers(x)
        return self.head(h.float())


@pytest.mark.parametrize(
    "region", [partial(torch.autocast, "cpu", torch.bfloat16), torch.no_grad], ids=["autocast", "no_grad"]
)
def test_units_end_within_a_region_too(region: Callable[[], Any]) -> None:
    model, x = InRegion(region), torch.randn(3, 4)
    assert len(measure_units(model, (x,)).units) >= 5
    for options in ({"stages": 3}, {"plan": "auto", "cluster": Cluster(2)}):
        pipe = pipeline(model, (x,), **options)
        assert pipe.num_stages > 1
        assert partita.verify(pipe, model, (x,)).check().compared["gradients of parameters"]


@dataclass
class Counting:
    """A runner that runs what it is given as it is, and counts."""

    graphs: int = 0
    calls: int = 0

    def for_module(self, module: nn.Module) -> nn.Module:
        raise AssertionError("units are compiled as graphs")

    def for_graph(
        self, gm: GraphModule, *, fixed_inputs: Collection[str] = (), returned: int | None = None
    ) -> Callable[..., Any]:
        self.graphs += 1
        return partial(self._run, gm)

    def _run(self, gm: GraphModule, *args: Any) -> Any:
        self.calls += 1
        return gm(*args)


def test_compiled_units_are_measured_compiled() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(3, 4)
    plain, runner = measure_units(model, (x,)), Counting()
    costs = measure_units(model, (x,), compile=runner, repeats=2)
    assert [unit.name for unit in costs.units] == [unit.name for unit in plain.units]
    assert [unit.parameter_bytes for unit in costs.units] == [unit.parameter_bytes for unit in plain.units]
    assert all(unit.forward_s > 0.0 and unit.backward_input_s is not None for unit in costs.units)
    kinds = 4  # the first unit has an input without a gradient, the last one is the last
    assert kinds <= runner.graphs <= 4 * kinds
    assert runner.calls >= 3 * runner.graphs  # a round that does not count, and two that do


def test_a_plan_for_compiled_stages_is_made_from_compiled_units() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    options = {"cluster": Cluster(2), "microbatches": 2, "schedule": "1F1B"}
    for plan, measured in ({"plan": "auto"}, True), ({"stages": 2, "schedule": "1F1B"}, False):
        runner = Counting()
        pipeline(model, (x,), compile=runner, **(options | plan))
        assert (runner.calls > 0) is measured


@pytest.mark.parametrize(
    ("device", "where", "message"),
    [(FixedSpeeds(1e9, 1e9), "cpu", "and device is FixedSpeeds"), (None, "meta", "is on the meta device")],
)
def test_where_nothing_runs_nothing_can_be_compiled(
    device: FixedSpeeds | None, where: str, message: str
) -> None:
    model, x = nn.Linear(4, 4, device=where), torch.randn(3, 4, device=where)
    with pytest.raises(ArgumentError, match=message):
        measure_units(model, (x,), device=device, compile="aot_eager")


class Skips(nn.Module):
    """A value goes past the middle: there, two tensors cross at least."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        h = first
        for layer in self.layers[1:-1]:
            h = layer(h)
        return self.layers[-1](h + first)


def test_inside_of_a_residual_block_there_is_no_border() -> None:
    costs = measure_units(Skips(), (torch.randn(3, 4),))
    assert [unit.name for unit in costs.units] == ["0:linear", "1:add", "2:linear"]


class Scales(nn.Module):
    """Makes its input small, and its result large again: after the first few operations two tensors cross."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu().exp().log()
        scale = x.abs().amax(-1, keepdim=True)
        h = x / scale
        for layer in self.layers:
            h = layer(h)
        return h * scale


def test_where_stages_are_more_than_units_wider_borders_are_taken_too_and_the_plan_can_be_used_again() -> (
    None
):
    model, x = Scales(), torch.rand(3, 4) + 0.5  # a sample of negative numbers alone has no scale
    assert len(measure_units(model, (x,)).units) < 6
    pipe = pipeline(model, (x,), stages=6)
    assert pipe.num_stages == 6
    assert torch.equal(pipe(x), model(x))
    assert pipeline(model, (x,), plan=pipe.plan).num_stages == 6


def test_progress_is_told_and_the_model_is_as_it_was() -> None:
    model, shares = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), []
    measure_units(model, (torch.randn(3, 4),), repeats=2, progress=shares.append)
    assert shares == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert model[0].num_batches_tracked == 0
    assert model.training


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 50))
def test_window_minima_are_those_of_each_window(numbers: list[int], reach: int) -> None:
    expected = [min(numbers[max(0, i - reach) : i + reach + 1]) for i in range(len(numbers))]
    assert _window_minima(numbers, reach) == expected


def test_no_border_is_taken_where_nothing_is_computed_between_two() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    weight = graph.create_node("get_attr", "weight")
    graph.output(graph.call_function(torch.add, (a, weight)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    nodes = list(graph.nodes)
    gaps = borders(nodes, {node: position for position, node in enumerate(nodes)})
    assert [gap.after for gap in narrow_borders(nodes, gaps)] == [1]


class Tables(nn.Module):
    """As in a model with rotary embeddings: a small table goes past all blocks but the first operations."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        table = x[:, :1, :1].detach().cos()
        for block in self.blocks:
            x = x + block(x * table)
        return x


def test_a_small_table_that_passes_all_blocks_does_not_hide_the_borders_between_them() -> None:
    costs = measure_units(Tables(), (torch.randn(2, 16, 16),), repeats=1)
    assert [unit.name.partition(":")[2] for unit in costs.units].count("add") == 6


def test_units_are_the_same_whichever_sizes_are_open() -> None:
    model, args = TRANSFORMER.model(), TRANSFORMER.data(2)[0]
    names = [
        [unit.name for unit in measure_units(model, args, repeats=1, dynamic_shapes=shapes).units]
        for shapes in (None, False)
    ]
    assert names[0] == names[1]


class Masked(nn.Module):
    """Blocks that get a mask where one is needed, made by many operations of the one that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        wanted = None if mask.bool().all() else self.widened(mask)
        for block in self.blocks:
            x = x + block(x).relu()
            x = x if wanted is None else x * wanted
        return x

    def widened(self, mask: Tensor) -> Tensor:
        rows = torch.arange(mask.shape[0])[:, None][: mask.shape[0]]
        columns = torch.arange(mask.shape[1])
        kept = mask[rows, columns][:, : mask.shape[1]].to(torch.float32)
        return (kept * 2.0 - kept).unsqueeze(-1)


def test_a_plan_made_without_data_fits_a_model_whose_ways_depend_on_data() -> None:
    model, args = Masked(), (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.long))
    with torch.device("meta"):
        unknown = Masked()
    costs = measure_units(unknown, tuple(x.to("meta") for x in args), device=FixedSpeeds(1e9, 1e9))
    plan = plan_stages(costs, 2)
    for shapes in (None, False):
        pipe = pipeline(model, args, plan=plan, dynamic_shapes=shapes)
        for padding in (0, 2):
            args[1][0, 6 - padding :] = 0
            assert torch.equal(pipe(*args), model(*args))


def test_no_unit_ends_where_each_stage_works_a_mask_out_by_itself() -> None:
    costs = measure_units(Masked(), (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.long)), repeats=1)
    assert not {"arange", "index"} & {unit.name.partition(":")[2] for unit in costs.units}


def test_equal_units_are_measured_once() -> None:
    costs = measure_units(Tables(), (torch.randn(2, 16, 16),), repeats=1)
    blocks = [unit for unit in costs.units if unit.name.endswith(":add")]
    assert len({(unit.forward_s, unit.backward_s, unit.spread) for unit in blocks[1:-1]}) == 1


def test_equal_units_are_of_one_kind() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), *(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 5))
    kinds = [unit.kind for unit in measure_units(model, (torch.arange(3),)).units]
    assert kinds == [0, 1, 1, 1, 2]


def test_a_model_on_the_meta_device_is_costed_for_a_device_by_the_same_code() -> None:
    with torch.device("meta"):
        model, x = Tables(), torch.empty(2, 16, 16)
    slow, fast = (measure_units(model, (x,), device=FixedSpeeds(speed, speed)) for speed in (1e9, 2e9))
    here = measure_units(Tables(), (torch.randn(2, 16, 16),), repeats=1)
    for one, two, measured in zip(slow.units, fast.units, here.units, strict=True):
        assert one.forward_s == pytest.approx(2 * two.forward_s)
        assert one.backward_input_s == pytest.approx(2 * (two.backward_input_s or 0.0))
        assert one.spread == 0.0
        assert one.activation_bytes == measured.activation_bytes
        assert one.weight_activation_bytes == measured.weight_activation_bytes
    assert slow.entry_bytes == here.entry_bytes


def test_a_loss_is_a_part_of_the_last_unit_and_what_the_model_returns_is_held_until_then() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 8)), torch.randn(16, 4)
    target = torch.randint(0, 8, (16,))
    plain = measure_units(model, (x,), repeats=1)
    lossy = measure_units(model, (x,), repeats=1, loss_fn=nn.functional.cross_entropy, target=target)
    assert plain.units[-1].activation_bytes == 16 * 8 * 4
    assert lossy.units[-1].activation_bytes >= 2 * 16 * 8 * 4  # the logits, and their log-softmax
    assert [unit.name for unit in lossy.units] == [unit.name for unit in plain.units]


def test_nothing_of_the_users_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    calls: list[object] = []
    model[0].weight.register_hook(calls.append)
    x = torch.randn(3, 4)
    before, x_before = {name: value.clone() for name, value in model.state_dict().items()}, x.clone()
    state = torch.get_rng_state()
    with torch.no_grad():
        costs = measure_units(model, (x,), repeats=1)
    assert costs.units[0].backward_s > 0.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == []


def test_a_unit_that_writes_to_what_it_is_given_can_be_measured() -> None:
    costs = measure_units(IN_PLACE.model(), IN_PLACE.data(3)[0], repeats=1)
    assert all(unit.forward_s > 0.0 for unit in costs.units)


def test_a_unit_that_fails_says_its_own_error_and_leaves_grad_mode_alone() -> None:
    gm = torch.fx.symbolic_trace(lambda x, y: torch.relu(x) @ y)
    message = "raises RuntimeError in them: mat1 and mat2 shapes cannot be multiplied"
    with torch.no_grad(), pytest.raises(PlanError, match=message) as caught:
        cost_model(gm, [], (torch.randn(2, 3), torch.randn(2, 3)))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert torch.is_grad_enabled()


@torch.library.custom_op("partita_test_costs::sign", mutates_args=())
def sign(x: Tensor) -> Tensor:
    return x.sign()


sign.register_fake(torch.empty_like)


class Infers(nn.Module):
    """An operator without a backward formula."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(sign(self.a(x)))


def test_a_model_that_can_only_infer_is_told_how_it_is_cut() -> None:
    """The error of its backward pass came out of the cut, also in evaluation without gradients."""
    model, x = Infers().eval(), torch.ones(2, WIDTH)
    with (
        pytest.warns(NotProven),
        pytest.raises(PlanError, match=r"no autograd formula.*requires_grad_\(False\)"),
    ):
        pipeline(model, (x,), stages=2)
    pipe = pipeline(model.requires_grad_(False), (x,), stages=2)
    assert torch.equal(pipe(x), model(x))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x[x.sum(1) > 0])  # type: ignore[no-any-return]


def test_on_the_meta_device_what_depends_on_data_is_named() -> None:
    # `partita plan --devices` ended in torch's "register_meta function for torch.nonzero() raises ...".
    with torch.device("meta"):
        model, x = Chosen(), torch.empty(6, 4)
    with pytest.raises(CaptureError, match=r"what 'index' returns depends on .* \(at return self\.last"):
        measure_units(model, (x,), device="H100")


class _Pair(TwoTensor):
    """Operators return plain tensors, as optimum-quanto's do."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(it.a if isinstance(it, cls) else it for it in args), **(kwargs or {}))


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return _Pair(weight.detach(), 2 * weight.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Any) -> Tensor:
        return x @ pair.b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros(4, 4)


class _Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Use.apply(x, _Wrap.apply(self.weight))


def test_functions_that_hand_on_wrappers_are_cut_where_one_says() -> None:
    """optimum-quanto's weights in training: a part that is run alone is handed a plain tensor, and the
    AttributeError of the model's own function came out."""
    model, x = nn.Sequential(nn.Linear(4, 4), _Wrapping(), nn.Linear(4, 4)), torch.randn(2, 4)
    with pytest.raises(PlanError, match=r"raises AttributeError in them: .* say where to cut"):
        pipeline(model, (x,), stages=4)
    pipe = pipeline(model, (x,), split_spec=dict.fromkeys("12", SplitPoint.BEGINNING))
    assert torch.equal(pipe(x), model(x))
