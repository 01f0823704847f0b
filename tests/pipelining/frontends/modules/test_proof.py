"""The proof sees what a pipe returns: the values, and of which class they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.capture.fast_path import TOKENS, Encoder, Preference
from tests.on_gpu import DEVICE, ON_GPU
from tests.pipelining.running import assert_equal
from torch import Tensor, nn

from partita import verify
from partita.errors import CaptureError, NotProven
from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, pipeline
from partita.pipelining.frontends.modules.pipe import ModulePipe
from partita.pipelining.frontends.modules.proof import check_against_model
from partita.pipelining.stages import materialise
from partita.runtime import Comm, InProcessWorld
from partita.verification.observing.copying import copy_module


class Deferred:
    """An object that is its own leaf, and that compares with nothing else as equal."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self) -> Tensor:
        return self.value


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), x.sum()


class Changed(nn.Module):
    """Stands for a pipe that returns something else than the model."""

    def __init__(self, model: nn.Module, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.model(x))


CHANGES = {
    "a list": (list, "the class of what it returns"),
    "one value less": (lambda pair: pair[:1], "how many values it returns"),
    "another value": (lambda pair: (pair[0] + 1e-3, pair[1]), "output 0"),
    "another dtype": (lambda pair: (pair[0], pair[1].double()), "output 1"),
    "an object that is called": (lambda pair: (pair[0], Deferred(pair[1])), "output 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_result_is_refused(name: str) -> None:
    model = Model()
    change, what = CHANGES[name]
    pipe = cast(ModulePipe, Changed(model, change))
    with pytest.raises(CaptureError, match=f"what it does whole: {what} differs in call 1"):
        check_against_model(pipe, model, (torch.ones(2, 3),), {}, training=True)


DEVICES = ["cpu", pytest.param(DEVICE, marks=ON_GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_pipe_that_draws_once_more_is_refused(device: str) -> None:
    model = Model().to(device)
    before = torch.get_rng_state()

    def draws(pair: Any) -> Any:
        torch.rand(1, device=device)
        return pair

    pipe = cast(ModulePipe, Changed(model, draws))
    with pytest.raises(CaptureError, match=r"the state of the (CPU|CUDA) generator( 0)? differs in call 1"):
        check_against_model(pipe, model, (torch.ones(2, 3, device=device),), {}, training=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_result_is_proven() -> None:
    model = Model()
    pipe = cast(ModulePipe, Changed(model, lambda pair: pair))
    check_against_model(pipe, model, (torch.ones(2, 3),), {}, training=False)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("options", [{"stages": 2}, {"split_spec": {"4": SplitPoint.BEGINNING}}])
def test_a_computed_weight_on_a_module_is_copied(options: dict[str, Any]) -> None:
    """`torch.nn.utils.weight_norm` leaves one, and ``copy.deepcopy`` refuses it."""
    torch.manual_seed(0)
    layers = [nn.utils.weight_norm(nn.Linear(8, 8)) if part % 2 == 0 else nn.ReLU() for part in range(6)]
    model, x, target = nn.Sequential(*layers), torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(model)
    whole = copy_module(model)
    pipe = pipeline(model, (x[:2],), frontend="modules", **options)
    assert pipe.proof.holds
    reference = UncutReference(whole, 4, nn.functional.mse_loss)
    for _ in range(2):
        reference.step(x, target=target)

    def body(comm: Comm) -> dict[str, Tensor | None]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(x, target=target)
        return {name: value.grad for name, value in stage.module.named_parameters()}

    gradients = {name: value for held in InProcessWorld(2).run(body) for name, value in held.items()}
    assert_equal(gradients, {name: value.grad for name, value in whole.named_parameters()})


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_a_model_that_evaluates_otherwise_without_gradients_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = {"encoder": SplitPoint.BEGINNING}
    model = Encoder(masked=True)
    with pytest.raises(CaptureError, match=r"under torch.no_grad.*set_fastpath_enabled"):
        pipeline(model, (TOKENS,), split_spec=points, frontend="modules")
    assert pipeline(model, (TOKENS,), split_spec=points, frontend="modules", modes="train").proof.holds
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    pipe = pipeline(model, (TOKENS,), split_spec=points, frontend="modules")
    assert pipe.proof.without_gradients == ""
    with torch.no_grad():
        assert torch.equal(pipe.eval()(TOKENS), model.eval()(TOKENS))


def test_what_differs_by_rounding_without_gradients_is_said() -> None:
    with pytest.warns(NotProven, match=r"under torch.no_grad.*set_fastpath_enabled"):
        pipe = pipeline(
            Encoder(masked=False), (TOKENS,), split_spec={"encoder": SplitPoint.BEGINNING}, frontend="modules"
        )
    assert pipe.proof.holds


class _Watches(nn.Module):
    """Hangs a hook on the graph of autograd in the code of one stage, for another one."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.a, self.b, self.late = nn.Linear(4, 4), nn.Linear(4, 4), late

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        node = h.grad_fn
        if self.late:
            h = self.b(h)
        if node is not None:
            node.register_hook(lambda *_: None)
        return cast(Tensor, h if self.late else self.b(h))


def test_a_pipe_that_refuses_its_own_example_is_refused_at_the_cut() -> None:
    """It called itself proven, and raised when it was called."""
    x, at_b = torch.randn(2, 4), {"b": SplitPoint.BEGINNING}
    with pytest.raises(
        CaptureError,
        match=r"does not run in training on its own example: .* 'register_hook' of a AddmmBackward0",
    ):
        pipeline(_Watches(late=True), (x,), split_spec=at_b, frontend="modules")
    model = _Watches(late=False)
    pipe = pipeline(model, (x,), split_spec=at_b, frontend="modules")
    assert pipe.proof.holds
    assert torch.equal(pipe(x), model(x))


class _Once(nn.Module):
    """Can be called once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.called = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if self.called:
            raise ValueError("called again")
        self.called = True
        return cast(Tensor, self.b(self.a(x)))


def test_a_model_that_raises_when_it_is_called_again_is_not_proven() -> None:
    with pytest.warns(NotProven, match="the model itself raises ValueError in call 2: called again"):
        pipe = pipeline(
            _Once(), (torch.randn(2, 4),), split_spec={"b": SplitPoint.BEGINNING}, frontend="modules"
        )
    assert not pipe.proof.holds


class _SeedsAnew(nn.Module):
    """Takes a new seed from the system in each call, as the reversible layers of Reformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.seed()
        return cast(Tensor, self.b(torch.nn.functional.dropout(self.a(x), 0.5)))


def test_a_model_that_differs_from_itself_is_not_proven() -> None:
    """It was refused as one that its cut changes, with the advice to cut it elsewhere."""
    with pytest.warns(NotProven, match="in training, two runs of the model itself differ in output 0"):
        pipe = pipeline(
            _SeedsAnew(), (torch.randn(8, 4),), split_spec={"b": SplitPoint.BEGINNING}, frontend="modules"
        )
    assert not pipe.proof.holds


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_backward_hooks_of_modules_are_called_on_their_stages() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)), list[str]()
    for name, child in model.named_children():
        child.register_full_backward_hook(lambda *_, name=name: seen.append(name))
        child.register_full_backward_pre_hook(lambda *_, name=name: seen.append(f"before {name}"))
    x = torch.randn(2, 4)
    model(x).sum().backward()
    expected, gradients = seen[:], [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING}, frontend="modules")
    seen.clear()
    pipe(x).sum().backward()
    assert seen == expected
    assert_equal([parameter.grad for parameter in model.parameters()], gradients)


def test_sparse_gradients_are_compared() -> None:
    """Torch can't compare them itself, and said so at the cut."""
    model = nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum", sparse=True), nn.Linear(4, 4), nn.Linear(4, 2))
    ids = torch.randint(8, (3, 2))
    pipe = pipeline(model, (ids,), split_spec={"2": SplitPoint.BEGINNING}, frontend="modules")
    assert pipe.proof.holds
    assert torch.equal(pipe(ids), model(ids))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_fast_path_within_forward_is_named_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages do not take it: they watch the calls of torch's functions."""
    x, at_trained = torch.randn(2, 5, 8), {"trained": SplitPoint.END}
    with pytest.raises(
        CaptureError, match=r"differs in call 1 of the example: that is torch's fast path for"
    ):
        pipeline(Preference(), (x,), split_spec=at_trained, frontend="modules")
    assert torch.backends.mha.get_fastpath_enabled()
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    assert pipeline(Preference(), (x,), split_spec=at_trained, frontend="modules").proof.holds


def test_a_model_without_memory_is_cut_and_not_proven() -> None:
    """Its stages get memory afterwards. Torch's error about copying out of meta tensors came instead."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    with pytest.warns(
        NotProven, match="not proven: the model, or its example, is on the meta device or fake"
    ):
        pipe = pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING}, frontend="modules")
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for index in range(2):
        stage = pipe.build_stage(index)
        materialise(stage, "cpu")
        stage.module.load_state_dict(whole.state_dict(), strict=False)
    x = torch.randn(3, 4)
    assert torch.equal(pipe(x), whole(x))


class _Counts(nn.Module):
    """Sets attributes, of its own and of a block, that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first.calls = 0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.first.calls += 1  # type: ignore[operator]
        self.hidden = self.first(x)
        result: torch.Tensor = self.last(self.hidden)
        return result


def test_attributes_of_the_model_that_stages_do_not_keep_are_no_difference() -> None:
    """`verify` said that the pipe is not the model, where with the export frontend it names what is left
    out.
    """
    model = _Counts()
    pipe = pipeline(model, (torch.ones(2, 3),), frontend="modules", split_spec={"last": SplitPoint.BEGINNING})
    assert set(pipe.unkept) == {"calls", "hidden"}
    verdict = verify(pipe, model, (torch.ones(2, 3),))
    verdict.check()
    assert set(verdict.left_out) == {"attribute calls", "attribute hidden"}


class Quantized(Tensor):
    """A weight of bytes and a scale, without memory of its own."""

    content: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, content: Tensor, scale: Tensor) -> Quantized:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=scale.dtype)
        wrapper.content, wrapper.scale = content, scale
        return cast("Quantized", wrapper)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["content", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Quantized:
        return Quantized(**parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].content), func(args[0].scale))
        raise NotImplementedError(func)


class QuantizedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        content = torch.arange(9, dtype=torch.int8).reshape(3, 3)
        self.weight = nn.Parameter(Quantized(content, torch.tensor(0.1)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = cast("Quantized", self.weight)
        return x @ (weight.content * weight.scale)


def test_weights_that_wrap_others_have_no_memory_that_could_be_another() -> None:
    """optimum-quanto's and torchao's: each wrapper has a key of its own, which was taken for a write."""
    model = nn.Sequential(nn.Linear(3, 3), QuantizedLinear())
    split_spec = {"1": SplitPoint.BEGINNING}
    pipe = pipeline(model, (torch.randn(2, 3),), split_spec=split_spec, frontend="modules")
    x = torch.randn(4, 3)
    assert torch.equal(pipe(x), model(x))
