"""Attempts to fool `verify`: each candidate is right in all but one respect."""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from partita.errors import VerificationFailed
from partita.verification import Verification, verify

X = torch.linspace(-1.0, 2.0, 12).reshape(3, 4)


class Net(nn.Module):
    """Parameters, a buffer that changes, a random draw, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        hidden = self.drop(self.norm(self.inner(x)))
        return {"hidden": hidden, "total": hidden.sum()}


def make_net() -> Net:
    torch.manual_seed(1)
    return Net()


def kinds(result: Verification) -> set[str]:
    return {difference.kind for difference in result.differences}


def only(result: Verification, kind: str, where: str) -> None:
    assert not result.ok
    assert [(d.kind, d.where) for d in result.differences] == [(kind, where)], str(result)


# --- what is equal ------------------------------------------------------------


def test_a_module_equals_itself_and_says_what_was_compared() -> None:
    net = make_net()
    result = verify(net, net, (X.clone().requires_grad_(),)).check()
    assert result.ok
    assert result.raised is None
    assert result.compared["outputs"] == 2
    assert result.compared["gradients of parameters"] == 4
    assert result.compared["gradients of inputs"] == 1
    assert result.compared["buffers"] == 4


def test_a_deep_copy_equals_the_module() -> None:
    net = make_net()
    assert verify(copy.deepcopy(net), net, (X,)).ok


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: torch.compile(net, backend="eager"),
        lambda net: lambda x: net(x),
        lambda net: functools.partial(net),
        lambda net: net.forward,
        lambda net: nn.ModuleDict({"whole": net})["whole"],
    ],
    ids=["compiled", "closure", "partial", "method", "nested"],
)
def test_every_way_to_call_the_same_module_is_equal_to_it(wrap: Callable[[nn.Module], Any]) -> None:
    net = make_net()
    verify(wrap(net), net, (X,)).check()


@pytest.mark.parametrize("train", [True, False])
def test_it_works_without_parameters_and_gradients(train: bool) -> None:
    result = verify(torch.neg, torch.neg, (X,), train=train).check()
    assert result.compared["gradients of parameters"] == 0


def test_train_false_runs_no_backward() -> None:
    assert verify(_Scaled(), _Plain(), (X.clone().requires_grad_(),), train=False).ok
    assert not verify(_Scaled(), _Plain(), (X.clone().requires_grad_(),)).ok


def test_keyword_arguments_reach_both() -> None:
    assert verify(torch.add, torch.add, (X, X), {"alpha": 2}).ok
    only(
        verify(lambda a, *, scale: a * scale["by"], lambda a, *, scale: a * 3, (X,), {"scale": {"by": 2}}),
        "output",
        "output",
    )


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    loss: torch.Tensor
    note: str


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dict whose keys are attributes too, as model libraries return it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Cache:
    """An ordinary object, registered nowhere."""

    def __init__(self, keys: list[torch.Tensor]) -> None:
        self.keys = keys


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (lambda t: (1, [t, None]), "output[1][0]"),
        (lambda t: {"a": {"b": t}}, "output['a']['b']"),
        (lambda t: Pair(1, t), "output.right"),
        (lambda t: Record(t, "x"), "output.loss"),
        (lambda t: ModelOutput(logits=t, other=None), "output['logits']"),
        (lambda t: Cache([t]), "output.keys[0]"),
    ],
)
def test_outputs_are_compared_however_they_are_nested(build: Callable[..., Any], where: str) -> None:
    assert verify(lambda x: build(x * 2), lambda x: build(x * 2), (X,)).ok
    only(verify(lambda x: build(x * 3), lambda x: build(x * 2), (X,)), "output", where)


# --- outputs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "reference", "message"),
    [
        (lambda x: x.double(), lambda x: x.clone(), "dtype is torch.float64, not torch.float32"),
        (lambda x: (x * 1).reshape(4, 3), lambda x: x * 1, r"shape is \(4, 3\), not \(3, 4\)"),
        (lambda x: [x * 1], lambda x: (x * 1,), "is list ..., not tuple ..."),
        (lambda x: None, lambda x: x * 0, "is None, not a tensor"),
        (lambda x: {"a": 1, "b": 2}, lambda x: {"b": 2, "a": 1}, "in the order"),
        (lambda x: {"a": 1}, lambda x: {"a": 1, "b": 2}, r"lacks \['b'\]"),
        (lambda x: 1, lambda x: True, "is 1, not True"),
        (lambda x: 1, lambda x: 1.0, "is 1, not 1.0"),
        (lambda x: -0.0, lambda x: 0.0, "is -0.0, not 0.0"),
        (lambda x: torch.tensor(-0.0), lambda x: torch.tensor(0.0), "1 of 1 elements"),
        (lambda x: x > 0, lambda x: x >= 0, None),
        (
            lambda x: torch.tensor([1, 2]),
            lambda x: torch.tensor([1, 3]),
            r"first at \[1\]: 2, not 3; max abs 1",
        ),
        (
            lambda x: torch.tensor([1.0, torch.nan]),
            lambda x: torch.tensor([1.0, 2.0]),
            r"nan, not 2.0; max abs inf",
        ),
        (lambda x: torch.tensor([1j, 2j]), lambda x: torch.tensor([1j, 2j + 1]), r"first at \[1\]"),
        (lambda x: x.bfloat16() * 1.01, lambda x: x.bfloat16(), "max ulp"),
        (lambda x: torch.empty(0, 3), lambda x: torch.empty(3, 0), "shape"),
        (lambda x: "a", lambda x: "b", "is 'a', not 'b'"),
    ],
)
def test_outputs_that_differ_are_told_apart(
    candidate: Callable[..., Any], reference: Callable[..., Any], message: str | None
) -> None:
    result = verify(candidate, reference, (X,))
    if message is None:
        assert result.ok  # no element of X is zero
        return
    assert kinds(result) == {"output"}
    with pytest.raises(VerificationFailed, match=message):
        result.check()


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        torch.tensor([torch.nan, 1.0]),
        torch.tensor([complex("nan")]),
        torch.empty(0),
        None,
        3,
        "s",
    ],
)
def test_equal_outputs_of_every_sort_are_equal(value: object) -> None:
    assert verify(lambda: copy.deepcopy(value), lambda: copy.deepcopy(value), ()).ok


def test_a_nan_equals_a_nan_with_another_payload() -> None:
    quiet, other = (torch.tensor([bits]).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert verify(lambda: quiet * 1, lambda: other * 1, ()).ok


def test_strides_count_only_on_request() -> None:
    def transposed(x: torch.Tensor) -> torch.Tensor:
        return (x * 1).t().contiguous().t()

    assert verify(transposed, lambda x: x * 1, (X,)).ok
    result = verify(transposed, lambda x: x * 1, (X,), strides=True)
    assert "stride is (1, 3), not (4, 1)" in str(result)


def test_a_tolerance_forgives_rounding_and_nothing_else() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * 2 * (1 + 1e-6)

    result = verify(noisy, lambda x: x * 2, (X,))
    assert not result.ok
    assert 0 < result.differences[0].max_abs < 1e-4  # type: ignore[operator]
    assert verify(noisy, lambda x: x * 2, (X,), rtol=1e-4).ok
    assert not verify(noisy, lambda x: x * 3, (X,), rtol=1e-4).ok
    assert not verify(lambda x: (x * 2).double(), lambda x: x * 2, (X,), rtol=1e-4).ok


# --- memory -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (lambda x: x[:1].clone(), lambda x: x[:1]),
        (lambda x: x[:1], lambda x: x[:1].clone()),
        (lambda x: x.clone(), lambda x: x),
        (lambda x: x.view_as(x), lambda x: x),
        (lambda x: (x * 2, x * 2), lambda x: 2 * ((x * 2),)),
        (lambda x: (lambda y: (y, y[:1].clone()))(x * 2), lambda x: (lambda y: (y, y[:1]))(x * 2)),
    ],
    ids=[
        "copy of view",
        "view of copy",
        "copy of input",
        "view of input",
        "two for one",
        "copy among outputs",
    ],
)
def test_who_shares_memory_with_whom_is_compared(
    candidate: Callable[..., Any], reference: Callable[..., Any]
) -> None:
    assert verify(reference, reference, (X,)).ok
    assert kinds(verify(candidate, reference, (X,))) == {"aliasing"}


def test_a_view_at_another_place_of_the_input_is_told_apart_even_where_the_values_are_equal() -> None:
    ones = torch.ones(4, 4)
    assert kinds(verify(lambda x: x[1], lambda x: x[0], (ones,))) == {"aliasing"}
    assert kinds(verify(lambda x: x[:, 0], lambda x: x[0], (ones,))) == {"aliasing"}


def test_a_parameter_that_is_returned_must_be_the_parameter() -> None:
    net = nn.Linear(2, 2)
    assert verify(lambda: net.weight, lambda: net.weight, ()).ok
    result = verify(lambda: net.weight.clone(), lambda: net.weight, ())
    assert "aliasing" in kinds(result)


def test_arguments_that_share_memory_still_do_in_the_copies() -> None:
    base = torch.zeros(4)

    def write(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part += 1
        return whole.sum()

    result = verify(write, lambda whole, part: (part.add_(1), torch.tensor(2.0))[1], (base, base[:2]))
    assert result.ok, str(result)


# --- gradients ----------------------------------------------------------------


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WrongGradient.apply(x)  # type: ignore[no-any-return]


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def test_right_outputs_with_wrong_gradients_are_told_apart() -> None:
    only(verify(_Scaled(), _Plain(), (X.clone().requires_grad_(),)), "gradient", "gradient of args[0]")
    net = make_net()
    result = verify(lambda x: {k: _WrongGradient.apply(v) for k, v in net(x).items()}, net, (X,))
    assert kinds(result) == {"gradient"}
    assert result.differences[0].where == "gradient of inner.weight"


def test_no_gradient_is_not_a_gradient_of_zeros() -> None:
    net = nn.Linear(4, 2)
    result = verify(lambda x: net(x), lambda x: nn.functional.linear(x, net.weight) + net.bias.detach(), (X,))
    only(result, "gradient", "gradient of bias")
    zero = verify(
        lambda x: net(x) + 0 * X.sum(), lambda x: nn.functional.linear(x, net.weight, net.bias * 1), (X,)
    )
    assert zero.ok
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    only(
        verify(lambda a, b: a + 0 * b, lambda a, b: a + 0 * b.detach(), (x, y)),
        "gradient",
        "gradient of args[1]",
    )


def test_an_output_that_lost_its_history_is_told_apart() -> None:
    net = nn.Linear(4, 2)
    result = verify(lambda x: net(x).detach(), net, (X,))
    assert "requires_grad is False, not True" in str(result)
    assert kinds(result) == {"output", "gradient"}


def test_gradients_of_a_tied_parameter_are_the_sum_over_its_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    tied = Tied()
    assert verify(copy.deepcopy(tied), tied, (X,)).ok
    untied = copy.deepcopy(tied)
    untied.b.weight = nn.Parameter(untied.a.weight.detach().clone())
    result = verify(untied, tied, (X,))
    assert kinds(result) == {"aliasing", "gradient"}
    assert "several separate tensors, which drift apart: a.weight, b.weight" in str(result)
    assert kinds(verify(tied, untied, (X,))) == {"aliasing", "gradient"}


def test_copies_of_an_attribute_that_each_call_makes_anew_need_only_be_equal() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x.sum()
            return x * 2

    class Twice(nn.Module):
        def __init__(self, off: float | None) -> None:
            super().__init__()
            self.first, self.second, self.off = Keeps(), Keeps(), off

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) if self.off is None else self.first(x) + 0 * self.second(x + self.off)

    kept = Keeps()
    both = Twice(0.0)
    both.second.seen = both.first.seen = kept.seen
    assert verify(both, kept, (X,)).ok
    stale = Twice(None)  # where one makes it, others may keep what they had
    stale.second.seen = stale.first.seen = kept.seen
    assert verify(stale, kept, (X,)).ok
    off = Twice(1.0)
    off.second.seen = off.first.seen = kept.seen
    assert "attribute" in kinds(verify(off, kept, (X,)))


def test_copies_of_an_attribute_that_is_written_to_drift_apart() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    reference = Counts()
    cut = nn.Sequential(Counts(), nn.Identity())
    cut[1].calls = reference.calls
    cut[0].calls = reference.calls
    cut[1].forward = lambda x: x - 0 * cut[1].calls
    assert verify(cut, reference, (X,)).ok
    cut[1].calls = reference.calls.clone()
    assert kinds(verify(cut, reference, (X,))) >= {"aliasing"}


def test_gradients_that_already_lie_there_are_added_to() -> None:
    net = nn.Linear(4, 2)
    net(X).sum().backward()

    def forgetful(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        return net(x)

    assert verify(net, net, (X,)).ok
    assert kinds(verify(forgetful, net, (X,))) == {"gradient"}


def test_a_gradient_for_a_parameter_that_the_reference_does_not_have_is_told() -> None:
    extra = nn.Parameter(torch.zeros(()))
    result = verify(lambda x: x * 1 + extra, lambda x: (x * 1).requires_grad_(), (X,))
    assert "the reference holds no such tensor, but the candidate gives a gradient to it" in str(result)
    reverse = verify(lambda x: (x * 1).requires_grad_(), lambda x: x * 1 + extra, (X,))
    assert "the candidate holds no such tensor, but the reference gives a gradient to it" in str(reverse)


def test_complex_and_narrow_and_sparse_gradients_are_compared() -> None:
    for dtype in (torch.complex64, torch.bfloat16, torch.float64):
        x = X.to(dtype).requires_grad_()
        assert verify(lambda a: a * a, lambda a: a * a, (x,)).compared["gradients of inputs"] == 1
        assert kinds(verify(lambda a: a.detach() * a, lambda a: a * a, (x,))) == {"gradient"}
    table = nn.Embedding(5, 3, sparse=True)
    ids = torch.tensor([1, 2, 1])
    assert verify(table, table, (ids,)).ok
    dense = copy.deepcopy(table)
    dense.sparse = False
    assert "layout is torch.strided, not torch.sparse_coo" in str(verify(dense, table, (ids,)))


# --- state --------------------------------------------------------------------


class _Forgetful(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.drop(self.norm(self.inner(x)))
        return {"hidden": hidden, "total": hidden.sum()}


def test_a_forgotten_buffer_update_is_told() -> None:
    net, forgetful = make_net(), _Forgetful()
    forgetful.load_state_dict(net.state_dict())
    only(verify(forgetful, net, (X,)), "buffer", "buffer steps")


def test_a_buffer_that_the_candidate_baked_in_is_told() -> None:
    net = make_net()
    steps = nn.Module()
    steps.norm, steps.inner, steps.drop = net.norm, net.inner, net.drop

    def without_steps(x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = steps.drop(steps.norm(steps.inner(x)))
        return {"hidden": hidden, "total": hidden.sum()}

    result = verify(without_steps, net, (X,))
    only(result, "buffer", "buffer steps")
    assert "the candidate holds no such tensor, but the reference changes it" in str(result)


def test_statistics_of_batch_norm_are_compared_in_training_and_training_flags_are_kept() -> None:
    net = make_net()
    evaluated = copy.deepcopy(net)
    evaluated.norm.eval()
    assert "buffer" in kinds(verify(evaluated, net, (X,)))
    assert verify(evaluated, evaluated, (X,)).ok
    assert net.norm.training
    assert not evaluated.norm.training


def test_a_different_initial_state_is_the_first_difference() -> None:
    net = make_net()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.inner.bias += 1
    result = verify(other, net, (X,))
    assert (result.differences[0].kind, result.differences[0].where) == (
        "initial state",
        "parameter inner.bias",
    )
    frozen = copy.deepcopy(net)
    frozen.inner.bias.requires_grad_(False)
    assert "requires_grad is False, not True" in verify(frozen, net, (X,)).differences[0].message


def test_a_counter_in_python_is_state_too() -> None:
    class Counting(nn.Module):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.calls = 0
            self.step = step

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += self.step
            return x + 1

    only(verify(Counting(2), Counting(1), (X,)), "attribute", "attribute calls")
    traced = torch.fx.symbolic_trace(Counting(0))
    only(verify(traced, Counting(1), (X,)), "attribute", "attribute calls")
    assert verify(traced, Counting(0), (X,)).ok


def test_a_tensor_that_a_module_holds_without_registering_it_is_state_too() -> None:
    class Loose(nn.Module):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.seen = torch.zeros(1)
            self.step = step

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += self.step
            return x + 1

    only(verify(Loose(2), Loose(1), (X,)), "attribute", "attribute seen")


def test_a_buffer_registered_by_the_run_is_state_too() -> None:
    class Lazy(nn.Module):
        def __init__(self, value: float | None) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.value is not None:
                self.register_buffer("late", torch.tensor(self.value))
            return x + 1

    assert "buffer late" in str(verify(Lazy(None), Lazy(1.0), (X,)))
    assert "buffer late" in str(verify(Lazy(1.0), Lazy(None), (X,)))
    assert "buffer late: 1 of 1 elements differ" in str(verify(Lazy(2.0), Lazy(1.0), (X,)))


def test_a_hook_on_a_graph_module_is_not_lost_in_the_copy() -> None:
    net = torch.fx.symbolic_trace(nn.Linear(4, 2))
    hooked = copy.deepcopy(net)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert not verify(hooked, net, (X,)).ok
    assert not verify(net, hooked, (X,)).ok


def test_state_that_the_graph_does_not_use_need_not_be_held() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    spare = Spare()
    verify(torch.fx.symbolic_trace(spare), spare, (X,)).check()
    verify(spare, torch.fx.symbolic_trace(spare), (X,)).check()


# --- arguments ----------------------------------------------------------------


def test_a_changed_argument_must_be_changed_alike() -> None:
    only(verify(lambda x: x.add_(1).sum(), lambda x: (x + 1).sum(), (X,)), "input", "args[0]")
    only(verify(lambda x: (x + 1).sum(), lambda x: x.add_(1).sum(), (X,)), "input", "args[0]")
    assert verify(lambda x: x.add_(1).sum(), lambda x: x.add_(1).sum(), (X,)).ok


def test_a_list_that_grew_is_told() -> None:
    def grow(items: list[int]) -> None:
        items.append(1)

    mine: list[int] = []
    only(verify(lambda items: None, grow, (mine,)), "input", "args[0]")
    assert mine == []


def test_an_argument_with_a_history_can_be_written_to_in_place() -> None:
    leaf = X.clone().requires_grad_()
    computed = leaf * 2
    assert verify(lambda x: x.mul_(3), lambda x: x.mul_(3), (computed,)).compared["gradients of inputs"] == 1
    result = verify(lambda x: x.mul_(3), lambda x: x.mul_(3).detach(), (computed,))
    assert "gradient" in kinds(result)
    assert leaf.grad is None


# --- order, randomness, settings ----------------------------------------------


def test_text_printed_in_another_order_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def say(*words: str) -> Callable[[], None]:
        return lambda: [print(word) for word in words] and None  # noqa: T201

    assert verify(say("a", "b"), say("a", "b"), ()).ok
    result = verify(say("b", "a"), say("a", "b"), ())
    only(result, "printed text", "printed line 1")
    assert r"is 'b\n', not 'a\n'" in str(result)
    assert "is missing" in str(verify(say("a"), say("a", "b"), ()))
    assert capsys.readouterr().out == ""


def test_one_random_number_more_is_told() -> None:
    def once() -> torch.Tensor:
        return torch.rand(2)

    def more() -> torch.Tensor:
        drawn = torch.rand(2)
        torch.rand(1)
        return drawn

    assert verify(once, once, ()).ok
    only(verify(more, once, ()), "random state", "CPU generator after forward")


def test_draws_in_another_order_are_told() -> None:
    def first() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(2), torch.rand(2)

    assert kinds(verify(lambda: first()[::-1], first, ())) == {"output"}


def test_draws_from_other_generators_are_told() -> None:
    only(
        verify(lambda: random.random() and None, lambda: None, ()),
        "random state",
        "Python generator after forward",
    )

    class Own(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)
            self.step = count

        def forward(self) -> None:
            torch.rand(self.step, generator=self.generator)

    only(verify(Own(1), Own(2), ()), "attribute", "attribute generator")
    assert verify(Own(1), Own(1), ()).ok
    free = torch.Generator().manual_seed(5)
    before = free.get_state()
    assert verify(lambda: torch.rand(1, generator=free), lambda: torch.rand(1, generator=free), ()).ok
    assert not verify(lambda: None, lambda: torch.rand(1, generator=free) and None, ()).ok
    only(verify(lambda g: None, lambda g: torch.rand(1, generator=g) and None, (free,)), "input", "args[0]")
    assert torch.equal(free.get_state(), before)


def test_a_draw_in_the_backward_is_told() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            torch.rand(1)
            return gradient

    result = verify(Noisy.apply, torch.clone, (X.clone().requires_grad_(),))
    only(result, "random state", "CPU generator after backward")


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        (lambda: torch.set_grad_enabled(False), "grad mode"),
        (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu"),
        (lambda: torch.set_autocast_dtype("cpu", torch.float16), "autocast dtype on cpu"),
        (lambda: torch.set_autocast_cache_enabled(False), "autocast cache"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms (enabled, warn only)"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype"),
    ],
)
def test_a_setting_that_is_left_changed_is_told_and_put_back(leak: Callable[[], None], name: str) -> None:
    def leaky(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        leak()
        return y

    result = verify(leaky, lambda x: x * 2, (X,))
    only(result, "global state", f"{name} after forward")
    assert verify(leaky, leaky, (X,)).ok
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_inference_mode_that_is_left_on_is_told_and_put_back() -> None:
    open_modes = []

    class Leaky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            open_modes.append(torch.inference_mode())
            open_modes[-1].__enter__()
            return y

    result = verify(Leaky(), lambda x: x * 2, (X,))
    assert "inference mode after forward" in {d.where for d in result.differences}
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_both_run_under_the_callers_modes(mode: Callable[[], Any]) -> None:
    net = nn.Linear(4, 2)
    seen = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), net(x).dtype))
            return x * 2

    with mode():
        expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), net(X).dtype)
        assert verify(net, net, (X,)).ok
        assert verify(Looking(), lambda x: x * 2, (X,)).ok
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), net(X).dtype) == expected
    assert seen == [expected]


# --- exceptions ---------------------------------------------------------------


def _raise(error: Exception) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        x += 1
        raise error

    return run


def test_exceptions_must_be_of_the_same_type() -> None:
    result = verify(_raise(ValueError("no")), _raise(ValueError("no")), (X,)).check()
    assert result.raised == "ValueError in forward: no"
    assert "up to the exception that both raise: ValueError in forward: no" in str(result)
    only(verify(_raise(TypeError("no")), _raise(ValueError("no")), (X,)), "exception", "exception")
    only(verify(_raise(ValueError("other")), _raise(ValueError("no")), (X,)), "exception", "exception")
    assert verify(_raise(ValueError("no\n\nWhile executing f")), _raise(ValueError("no")), (X,)).ok


def test_raising_where_the_other_returns_is_told() -> None:
    for pair in (
        (_raise(ValueError("no")), lambda x: x.add_(1)),
        (lambda x: x.add_(1), _raise(ValueError("no"))),
    ):
        result = verify(*pair, (X,))
        assert result.raised is None
        assert result.differences[0].kind == "exception"
        assert "ValueError in forward: no" in str(result)


def test_what_was_changed_before_the_exception_is_compared() -> None:
    def early(x: torch.Tensor) -> None:
        raise ValueError("no")

    only(verify(early, _raise(ValueError("no")), (X,)), "input", "args[0]")


def test_an_exception_in_the_backward_is_compared_too() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ValueError("no way back")

    x = X.clone().requires_grad_()
    assert verify(Failing.apply, Failing.apply, (x,)).raised == "ValueError in backward: no way back"
    assert verify(Failing.apply, torch.clone, (x,)).differences[0].kind == "exception"


# --- the caller's things ------------------------------------------------------


def test_nothing_of_the_callers_changes() -> None:
    net = make_net()
    net.drop.eval()
    net(X)["total"].backward()
    x = X.clone().requires_grad_()
    x.grad = torch.full_like(x, 7.0)
    state = copy.deepcopy(net.state_dict())
    gradients = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}  # type: ignore[union-attr]
    objects = {name: id(parameter) for name, parameter in net.named_parameters()}
    versions = {name: tensor._version for name, tensor in net.state_dict(keep_vars=True).items()}
    generator, python = torch.get_rng_state(), random.getstate()

    verify(lambda a: net(a), net, (x,)).check()
    verify(_raise(ValueError("no")), net, (x,))

    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == objects
    assert all(torch.equal(p.grad, gradients[name]) for name, p in net.named_parameters())  # type: ignore[arg-type]
    assert {name: t._version for name, t in net.state_dict(keep_vars=True).items()} == versions
    assert torch.equal(x, X)
    assert torch.equal(x.grad, torch.full_like(x, 7.0))
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python
    assert (net.training, net.norm.training, net.drop.training) == (True, True, False)


def test_the_same_call_gives_the_same_answer() -> None:
    net, other = make_net(), make_net()
    with torch.no_grad():
        other.inner.bias += 1
    first, second = (verify(other, net, (X,)) for _ in range(2))
    assert first == second
    assert str(first) == str(second)


def test_the_seed_decides_what_is_drawn() -> None:
    def lucky(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) < 0.5 else x * 3

    def unlucky(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) < 0.5 else x * 4

    results = {verify(lucky, unlucky, (X,), seed=seed).ok for seed in range(12)}
    assert results == {True, False}


# --- bad usage ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"args": X},
            TypeError,
            r"args is a Tensor; give a tuple of the positional arguments, such as \(x,\)",
        ),
        ({"args": [X]}, TypeError, "args is a list"),
        ({"kwargs": [1]}, TypeError, "kwargs is a list; give a mapping"),
        ({"candidate": 3}, TypeError, "can't run a int: give a module, a split or a function"),
        ({"seed": -1}, ValueError, r"seed is -1; give an int in \[0, 2\*\*32\)"),
        ({"seed": 1.5}, TypeError, "seed is a float"),
        ({"rtol": -1.0}, ValueError, "rtol is -1.0; give a finite number that is at least 0"),
        ({"atol": float("inf")}, ValueError, "atol is inf"),
        ({"args": ((i for i in ()),)}, TypeError, "can't copy .*give modules, functions over modules"),
    ],
)
def test_bad_usage_is_explained(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"candidate": torch.neg, "reference": torch.neg, "args": (X,), **change}
    with pytest.raises(error, match=message):
        verify(**given)


def test_a_compiled_function_over_a_module_is_refused_with_the_next_step() -> None:
    net = nn.Linear(4, 2)
    compiled = torch.compile(lambda x: net(x), backend="eager")
    with pytest.raises(TypeError, match="compile the module instead"):
        verify(compiled, net, (X,))


@pytest.mark.parametrize("build", [make_net, lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2)))])
def test_a_backend_that_computes_something_else_is_told(build: Callable[[], nn.Module]) -> None:
    # A compiled graph module hands out the plain one to deepcopy: that would have been verified instead.
    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *args: tuple(x * 2 if x.is_floating_point() else x for x in graph(*args))

    torch._dynamo.reset()
    net = build()
    assert not verify(torch.compile(net, backend=backend), net, (X,)).ok
    torch._dynamo.reset()
