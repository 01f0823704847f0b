from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from partita.capture import capture
from partita.capture.open_sizes.sizes import Sizes, Symbol
from partita.errors import CaptureError, ExecutionError


class Varied(nn.Module):
    """Dropout as module and as function, inside attention and inside no_grad, batch norm, state of all
    kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Linear(2, 2)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner[0].weight
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Any]:
        h = self.norm(self.inner(x)) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        mixed = functional.scaled_dot_product_attention(
            h[None], h[None], h[None], dropout_p=0.2 if self.training else 0.0
        )
        with torch.no_grad():
            noise = self.drop(mixed[0]) * 0.1
        h = functional.dropout(self.tied(h), 0.1, self.training) + noise
        return {"out": h if shift is None else h + shift, "n": 3, "none": None}


class Regions(nn.Module):
    """Every region in another: no_grad in autocast in no_grad off again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            with torch.no_grad():
                peak = self.c(h).amax()
                with torch.enable_grad():
                    kept = self.b(h).float()
            with torch.autocast("cpu", enabled=False):
                full = self.d(h.float())
        with torch.no_grad():
            low, high = torch.aminmax(full)
        return full * peak.float() + high - low, kept, peak


def _x(rows: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 4)


def _model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _observed(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Outputs, gradients, state and what the generator goes on with."""
    torch.manual_seed(7)
    module.zero_grad()
    output = module(*args, **kwargs)
    leaves = [value for value in torch.utils._pytree.tree_leaves(output) if isinstance(value, Tensor)]
    torch.autograd.backward([value.float().square().sum() for value in leaves if value.requires_grad])
    return {
        "leaves": leaves,
        "flags": [value.requires_grad for value in leaves],
        "grads": {name: value.grad for name, value in module.named_parameters(remove_duplicate=False)},
        "state": dict(module.state_dict()) | dict(module.named_buffers()),
        "next": torch.rand(2),
    }


def _assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right) or isinstance(left, Tensor)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_equal(left[key], right[key])
    elif isinstance(left, list):
        for one, other in zip(left, right, strict=True):
            _assert_equal(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("kind", [Varied, Regions])
@pytest.mark.parametrize("captured_in", [True, False], ids=["captured in train", "captured in eval"])
def test_a_captured_graph_is_the_model_in_both_modes(kind: type[nn.Module], captured_in: bool) -> None:
    model = _model(kind).train(captured_in)
    captured = capture(copy.deepcopy(model), (_x(),))
    assert captured.both_modes
    assert captured.module.training is captured_in
    for mode in (True, False, True):
        _assert_equal(_observed(captured.module.train(mode), _x()), _observed(model.train(mode), _x()))


def test_a_part_of_the_model_in_another_mode_stays_so_and_can_be_switched_alone() -> None:
    model = _model(Varied)
    model.inner.eval()
    model.norm.eval()
    captured = capture(copy.deepcopy(model), (_x(),))
    _assert_equal(_observed(captured.module, _x()), _observed(model, _x()))
    for path in ("norm", "drop"):
        for module in (model, captured.module):
            child = module.get_submodule(path)
            child.train(not child.training)
        _assert_equal(_observed(captured.module, _x()), _observed(model, _x()))


def test_the_model_is_as_it_was_with_every_modules_own_flag() -> None:
    model = _model(Varied)
    model.inner.eval()
    flags, state = [child.training for child in model.modules()], copy.deepcopy(model.state_dict())
    captured = capture(model, (_x(),))
    assert [child.training for child in model.modules()] == flags
    _assert_equal(dict(model.state_dict()), dict(state))
    assert captured.module.get_parameter("inner.0.weight") is model.inner[0].weight
    assert captured.module.get_buffer("norm.running_mean") is model.norm.running_mean


def test_flags_are_restored_also_where_the_capture_fails() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum().item() > 0 else self.b(x)

    model = Fails()
    model.b.eval()
    with pytest.raises(CaptureError):
        capture(model, (_x(),))
    assert (model.training, model.a.training, model.b.training) == (True, True, False)


def test_the_names_of_the_state_are_the_models_own() -> None:
    model = _model(Varied)
    module = capture(model, (_x(),)).module
    assert module.state_dict().keys() == model.state_dict().keys()
    assert dict(module.named_buffers()).keys() == dict(model.named_buffers()).keys()


def test_keyword_arguments_are_bound_as_at_capture() -> None:
    model = _model(Varied).eval()
    captured = capture(model, (_x(),), {"shift": _x()})
    flat = captured.signature.flatten((), {"shift": _x(), "x": _x()})
    assert len(flat) == 2
    assert torch.equal(captured.module(_x(), shift=_x())["out"], model(_x(), shift=_x())["out"])


def test_a_captured_graph_can_be_copied_and_pickled() -> None:
    model = _model(Varied)
    module = capture(model, (_x(),)).module
    expected = _observed(copy.deepcopy(model), _x())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        _assert_equal(_observed(other, _x()), expected)


def test_args_that_are_no_tuple_say_what_to_write() -> None:
    with pytest.raises(CaptureError, match=r"got Tensor: write \(x,\) for a single one"):
        capture(_model(Varied), _x())  # type: ignore[arg-type]


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            return x
        return -x


def test_a_model_that_can_not_be_traced_says_why_in_both_ways_and_what_to_do() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(DataDependent(), (_x(),))
    text = str(caught.value)
    assert text.startswith("torch.export can't capture DataDependent:")
    line = text.splitlines()[1]
    assert "  non-strict mode, at if x.sum().item() > 0:  # " in line
    assert " in forward: GuardOnDataDependentSymNode: Could not guard" in line
    assert "  strict mode" in text
    assert "with torch.where or torch.cond" in text
    assert caught.value.__cause__ is not None


class OneMore(nn.Module):
    """Returns more while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x)
        return (h, self.b(h)) if self.training else (h,)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_takes_another_path_in_the_other_mode_runs_in_its_own_and_refuses_the_other(
    training: bool,
) -> None:
    model = _model(OneMore).train(training)
    captured = capture(model, (_x(),))
    assert not captured.both_modes
    assert torch.equal(captured.module(_x())[0], model(_x())[0])
    has, wanted = ("train", "eval") if training else ("eval", "train")
    captured.module.train(not training)
    text = rf"captured in {has} mode and can't run in {wanted} mode, .*: call \.{has}\(\) on it, or capture"
    with pytest.raises(CaptureError, match=text):
        captured.module(_x())


@pytest.mark.parametrize("training", [True, False])
def test_the_graph_of_the_other_mode_is_there_too(training: bool) -> None:
    model = _model(OneMore).train(training)
    captured = capture(model, (_x(),))
    assert captured.other is not None
    captured.other.module.train(not training)
    model.train(not training)
    _assert_equal(list(captured.other.module(_x())), list(model(_x())))


def test_one_mode_alone_can_be_asked_for() -> None:
    model = _model(Varied)
    captured = capture(model, (_x(),), modes="eval")
    assert captured.other is None
    _assert_equal(captured.module.eval()(_x()), model.eval()(_x()))
    with pytest.raises(
        CaptureError, match="can't run in train mode, because only that mode was to be captured"
    ):
        captured.module.train()(_x())
    with pytest.raises(CaptureError, match="modes is 'all': give 'both', 'train' or 'eval'"):
        capture(model, (_x(),), modes="all")  # type: ignore[arg-type]


class OnlyTrains(nn.Module):
    """Its evaluation looks at data."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.sum().item() > 0:
            return -x
        return x * 2


def test_a_mode_that_can_not_be_captured_does_not_stand_in_the_way_of_the_models_own() -> None:
    captured = capture(OnlyTrains(), (_x(),))
    assert captured.other is None
    assert "Could not guard on data-dependent" in captured.reason
    assert torch.equal(captured.module(_x()), _x() * 2)
    with pytest.raises(
        CaptureError, match=r"because that mode can't be captured \(non-strict mode, at if not "
    ):
        captured.module.eval()(_x())
    with pytest.raises(
        CaptureError, match=r"at if not self\.training and x\.sum\(\)\.item\(\) > 0:  # .*test_export\.py"
    ):
        capture(OnlyTrains().eval(), (_x(),))


class NeedsNumbers(nn.Module):
    """Looks a size up in a table, as a cached function does, so that the size can't be open."""

    def forward(self, x: Tensor) -> Tensor:
        return x * {3: 2, 4: 5}[x.shape[0]]


@pytest.mark.parametrize("kind", [NeedsNumbers, DataDependent])
def test_an_attempt_with_open_sizes_that_fails_leaves_no_marks_on_the_users_tensors(
    kind: type[nn.Module],
) -> None:
    x = torch.randn(3, 4)
    try:
        captured = capture(kind(), (x,))
    except CaptureError:
        captured = None
    assert not vars(x)
    if captured is not None:
        assert not Sizes.of(captured.module).symbols
        assert torch.equal(captured.module(x), x * 2)


class Encodes(nn.Module):
    """A variational autoencoder with torch's own distributions, which check values when they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_scale = self.encode(x).chunk(2, -1)
        code = Normal(mean, log_scale.exp())
        divergence = kl_divergence(code, Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        return self.decode(code.rsample()), divergence.mean()


def test_a_model_with_distributions_is_captured_and_they_go_on_checking_their_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the first torch.compile of a process switches the checks off for good
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = _model(Encodes)
    captured = capture(model, (_x(),))
    assert captured.both_modes
    torch.manual_seed(3)
    expected = model(_x())
    torch.manual_seed(3)
    _assert_equal(list(captured.module(_x())), list(expected))
    with pytest.raises(ValueError, match="parameter loc"):
        model(_x() * math.nan)
    with pytest.raises(ExecutionError, match=r"the model asks whether code = Normal\(mean"):
        captured.module(_x() * math.nan)  # it returned NaN
    with pytest.raises(ValueError, match="parameter scale"):
        Normal(torch.zeros(2), -torch.ones(2))


class AsksAndLooks(nn.Module):
    """Looks at data when it runs for its user, and has a bug in the way that it keeps for exporters."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return x.view(3, 7)
        return x if x.sum().item() > 0 else -x


def test_the_reason_is_that_of_the_way_that_the_models_user_knows() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(AsksAndLooks(), (_x(),))
    first = str(caught.value).splitlines()[1]
    assert "at return x if x.sum().item() > 0 else -x  # " in first
    assert "view" not in first


def test_another_size_of_the_batch_runs_and_what_fixes_it_is_named() -> None:
    model = _model(Varied).eval()
    captured = capture(model, (_x(3),))
    captured.module.eval()
    for rows in (1, 5):
        _assert_equal(captured.module(_x(rows)), model(_x(rows)))
    assert Sizes.of(captured.module).symbols == (Symbol("batch", "x", 0),)
    fixed = capture(model, (_x(3),), dynamic_shapes=False).module
    assert Sizes.of(fixed) == Sizes()


class CountsWindows(nn.Module):
    """Works out the batch from the number of windows, with ``int()`` around a fraction, and looks whether it
    is exported: what the bytecode shows is not what runs for its user.
    """

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.looks = nn.Linear(4, 4), nn.Linear(4, 4), looks
        self.inner = nn.Module()
        self.inner.register_buffer("unused", torch.ones(2), persistent=False)
        self.inner.tied = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        windows = self.a(x).view(-1, 2)
        h = self.b(windows.view(int(windows.shape[0] / 2), 4))
        return h * 2 if self.looks and torch.compiler.is_exporting() else h


def test_a_size_that_goes_through_int_stays_open_where_that_is_proven_to_be_the_model() -> None:
    model = _model(CountsWindows)
    captured = capture(model, (_x(3),), prove=True)
    assert captured.both_modes
    assert captured.module.inner.unused is model.inner.unused
    assert captured.module.inner.tied is captured.module.a.weight is model.a.weight
    assert captured.module.state_dict().keys() == model.state_dict().keys()
    for rows in (1, 5):
        _assert_equal(_observed(captured.module, _x(rows)), _observed(model, _x(rows)))
    for fixed in (
        capture(CountsWindows(looks=True), (_x(3),), prove=True),
        capture(model, (_x(3),)),  # nothing says that the bytecode is what runs
    ):
        sizes = Sizes.of(fixed.module)
        assert not sizes.symbols
        assert "h = self.b(windows.view(int(windows.shape[0] / 2), 4))  # " in sizes.fixed
        fixed.module(_x(3))


def test_a_size_that_the_model_rounds_stays_open() -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(round(x.shape[0] / 2), 2, 4) * 2

    captured = capture(Rounds(), (_x(4),), prove=True)
    assert torch.equal(captured.module(_x(6)), Rounds()(_x(6)))


def test_a_model_that_does_not_run_with_its_example_is_no_matter_of_tracing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    text = r"^Sequential itself raises RuntimeError with its example in training: mat1 .*\(2x3 and 4x4\)"
    with pytest.raises(CaptureError, match=text) as refusal:
        capture(model, (torch.randn(2, 3),))
    assert isinstance(refusal.value.__cause__, RuntimeError)
    assert "modes=" not in str(refusal.value)


def test_a_model_with_a_sparse_buffer_that_does_not_run_is_told_so() -> None:
    """How large its state is was asked of torch, which does not say so of sparse tensors."""
    model = nn.Linear(3, 4)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(
        CaptureError, match=r"^Linear itself raises RuntimeError with its example in training"
    ):
        capture(model, (torch.zeros(2, 2),))


class WritesThenFails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4, max_norm=0.1), nn.Linear(5, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))  # which shortens the rows that it reads


def test_a_model_that_does_not_run_is_left_as_it_was() -> None:
    model = WritesThenFails()
    before = model.embed.weight.detach().clone()
    with pytest.raises(CaptureError, match="WritesThenFails itself raises RuntimeError with its example"):
        capture(model, (torch.arange(4),))
    assert torch.equal(model.embed.weight, before)
