"""A recording runs a copy of the model on the example: what forward does to parameters stays in the copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pipelining.running import assert_equal
from torch import Tensor, nn

from partita.errors import CaptureError, PartitaError
from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, pipeline
from partita.runtime import Comm, InProcessWorld
from partita.verification import verify

SPEC = {"head": SplitPoint.BEGINNING}
Update = Callable[[Tensor, Tensor], object]


def _no_grad(shadow: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        shadow.mul_(0.9).add_(value, alpha=0.1)


def _replace(shadow: Tensor, value: Tensor) -> None:
    shadow.data = shadow.data * 0.9 + value.data * 0.1


def _assign_item(shadow: Tensor, value: Tensor) -> None:
    shadow.data[0] = value.data[0]


UPDATES: dict[str, Update] = {
    "replaced data": _replace,
    "data": lambda shadow, value: shadow.data.mul_(0.9).add_(value.data),
    "detached": lambda shadow, _: shadow.detach().mul_(0.9),
    "no_grad": _no_grad,
    "an item": _assign_item,
    "out": lambda shadow, value: torch.add(shadow.data, value.data, out=shadow.data),
    "foreach": lambda shadow, _: torch._foreach_mul_([shadow.data], 0.9),
    "init": lambda shadow, _: nn.init.zeros_(shadow),
    "through a view": lambda shadow, _: shadow.data.view(-1)[1:].zero_(),
    "inplace=True": lambda shadow, _: nn.functional.relu(shadow.data, inplace=True),
}


class Averaging(nn.Module):
    """Follows the weights of ``net`` with those of ``shadow``, in ``forward``."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update = update
        self.net, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shadow = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        if self.training:
            for value, shadow in zip(self.net.parameters(), self.shadow.parameters(), strict=True):
                self.update(shadow, value)
        return self.head(h)  # type: ignore[no-any-return]


class Renormed(nn.Module):
    """Limits the norms of its weight's rows before it uses it, as EEGNet's convolutions do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.net.weight.data = torch.renorm(self.net.weight.data, p=2, dim=0, maxnorm=0.1)
        return self.head(self.net(x))  # type: ignore[no-any-return]


class Embedded(nn.Module):
    """``max_norm`` writes to the weight within one function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Embedding(4, 4, max_norm=0.1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x.argmax(-1)))  # type: ignore[no-any-return]


class Unfrozen(Averaging):
    def __init__(self) -> None:
        super().__init__(lambda shadow, _: shadow.requires_grad_(True))


class Late(Averaging):
    """Writes in its second call only, which no recording sees."""

    def __init__(self) -> None:
        super().__init__(self._second)
        self.calls = 0

    def _second(self, shadow: Tensor, value: Tensor) -> None:
        self.calls += 1
        if self.calls > 2:  # two parameters a call
            _replace(shadow, value)


class Together(nn.Module):
    """Writes to several parameters in one call, as BYOL's target network does in some implementations."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.shadow, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.shadow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        torch._foreach_lerp_(list(self.shadow.parameters()), list(self.net.parameters()), 0.5)
        return self.head(self.net(x))  # type: ignore[no-any-return]


class AsBuffers(nn.Module):
    """What the refusal of `Averaging` recommends."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shadow", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        self.shadow.copy_(self.shadow * 0.9 + self.net.weight.data * 0.1)
        return self.head(h)  # type: ignore[no-any-return]


def _state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [
        (value.data_ptr(), value._version, value.requires_grad, value.detach().clone()) for value in tensors
    ]


def _assert_refused(model: nn.Module, name: str, **options: Any) -> None:
    before = _state(model)
    with pytest.raises(
        CaptureError, match=f"the model writes to its parameter '{name}' in forward.*make it a"
    ):
        pipeline(model, (torch.randn(2, 4),), frontend="modules", **options)
    assert_equal(_state(model), before)


@pytest.mark.parametrize(
    "options", [{"split_spec": SPEC}, {"stages": 2}, {"split_spec": SPEC, "prove": False}]
)
@pytest.mark.parametrize("update", UPDATES)
def test_a_parameter_that_forward_writes_to_is_refused_and_stays_as_it_was(
    update: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    _assert_refused(Averaging(UPDATES[update]), "shadow.weight", **options)


@pytest.mark.parametrize("make", [Renormed, Embedded])
def test_so_is_one_that_is_trained(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    _assert_refused(make(), "net.weight", split_spec=SPEC)


def test_all_parameters_that_one_call_writes_to_stay_as_they_were() -> None:
    torch.manual_seed(0)
    _assert_refused(Together(), "shadow.weight", split_spec=SPEC)


def test_the_proof_sees_data_that_a_later_call_replaces() -> None:
    torch.manual_seed(0)
    _assert_refused(Late(), "shadow.weight", split_spec=SPEC)


def test_a_flag_that_forward_sets_stays_in_the_copy() -> None:
    torch.manual_seed(0)
    model = Unfrozen()
    before = _state(model)
    pipeline(model, (torch.randn(2, 4),), split_spec=SPEC, frontend="modules")
    assert_equal(_state(model), before)


def test_the_same_average_in_a_buffer_is_the_whole_models_step_after_step() -> None:
    torch.manual_seed(0)
    model, x, target = AsBuffers(), torch.randn(8, 4), torch.randn(8, 4)
    whole, before = copy.deepcopy(model), _state(model)
    pipe = pipeline(model, (x[:2],), split_spec=SPEC, frontend="modules")
    assert_equal(_state(model), before)
    reference = UncutReference(whole, 4, nn.functional.mse_loss)
    for _ in range(3):
        reference.step(x, target=target)

    def body(comm: Comm) -> dict[str, Tensor]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
        for _ in range(3):
            schedule.step(x, target=target)
        return stage.module.state_dict()

    held = {name: value for state in InProcessWorld(2).run(body) for name, value in state.items()}
    assert_equal(held, dict(whole.state_dict()))


class Hamiltonian(nn.Module):
    """Takes a gradient in forward, and so raises where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.energy, self.head = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        energy = self.energy(torch.tanh(x)).sum()
        return self.head(torch.autograd.grad(energy, x, create_graph=True)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{"split_spec": SPEC}, {"stages": 2}])
def test_a_model_that_raises_without_gradients_is_refused_and_cut_for_training(
    options: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    model, x = Hamiltonian(), torch.randn(2, 4)
    message = (
        "Hamiltonian itself raises RuntimeError on the example in evaluation without gradients .element 0 of "
        "tensors does not require grad.*modes='train'"
    )
    with pytest.raises(CaptureError, match=message):
        pipeline(model, (x,), frontend="modules", **options)
    pipe = pipeline(model, (x,), frontend="modules", modes="train", split_spec=SPEC)
    assert pipe.proof.holds
    assert_equal(pipe(x), copy.deepcopy(model)(x))
    message = "cut at its blocks, Hamiltonian raises RuntimeError in training .*Cut at other modules"
    within = {"energy": SplitPoint.BEGINNING}
    with pytest.raises(CaptureError, match=message):
        pipeline(model, (x,), frontend="modules", modes="train", split_spec=within)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, (x,)))


def test_what_torch_compiles_by_itself_is_refused_with_the_reason_and_cut_as_a_graph() -> None:
    # It was said that the model does not take its example.
    model, x = Branches(), torch.randn(2, 4)
    message = r"Branches calls what torch compiles \(torch.cond, .*leave frontend= out"
    with pytest.raises(CaptureError, match=message):
        pipeline(model, (x,), stages=2, frontend="modules")
    assert pipeline(model, (x,), stages=2, prove=False).num_stages == 2


class Compiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = torch.compile(lambda x: x.sin() * 2, backend="aot_eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, where the model runs uncut
def test_what_a_model_compiles_runs_in_stages_as_it_was_written() -> None:
    """Dynamo traced partita's own functions for it, over and over; with ``fullgraph=True`` it was refused."""
    model, x = Compiles(), torch.randn(2, 4)
    pipe = pipeline(model, (x,), stages=2, frontend="modules")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(pipe(x), model.last((model.first(x)).sin() * 2))
    assert not torch._dynamo.utils.counters["frames"]


def test_an_example_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"raises RuntimeError on the example in training .*give an example"
    ):
        pipeline(AsBuffers(), (torch.randn(2, 5),), split_spec=SPEC, frontend="modules")


class Converting(nn.Module):
    """Converts a layer to the dtype that it has, as the router of Switch Transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(torch.float32)
        return self.layer(x).relu()


def test_a_parameter_whose_data_is_set_to_itself_is_not_written_to() -> None:
    model, x = nn.Sequential(Converting(), Converting()), torch.randn(2, 4)
    pipe = pipeline(model, (x,), stages=2, frontend="modules")
    assert verify(pipe, model, (x,)).ok


class Linearizes(nn.Module):
    """Traces one of its layers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = torch.func.linearize(self.first, x)
        return self.head(output)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's, of its own linearize
def test_a_model_that_traces_its_layer_is_refused() -> None:
    """Each copy of a parameter that the recording made for itself was one more node of the model's trace,
    which had no end.
    """
    with pytest.raises(PartitaError, match="Linearizes does not run in training on its own example"):
        pipeline(Linearizes(), (torch.randn(2, 4),), split_spec=SPEC, frontend="modules")
