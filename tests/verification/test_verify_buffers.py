"""The state of a module before and after a run: buffers, counters, hooks, other attributes."""

from __future__ import annotations

import copy

import torch
from tests.verification.nets import Net, X, assert_only, kinds, make_net
from torch import nn

from partita.verification import verify


class _Forgetful(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.drop(self.norm(self.inner(x)))
        return {"hidden": hidden, "total": hidden.sum()}


def test_a_forgotten_buffer_update_is_reported() -> None:
    net, forgetful = make_net(), _Forgetful()
    forgetful.load_state_dict(net.state_dict())
    assert_only(verify(forgetful, net, (X,)), "buffer", "buffer steps")


def test_a_buffer_that_the_candidate_baked_in_is_reported() -> None:
    net = make_net()
    steps = nn.Module()
    steps.norm, steps.inner, steps.drop = net.norm, net.inner, net.drop

    def without_steps(x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = steps.drop(steps.norm(steps.inner(x)))
        return {"hidden": hidden, "total": hidden.sum()}

    result = verify(without_steps, net, (X,))
    assert_only(result, "buffer", "buffer steps")
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

    assert_only(verify(Counting(2), Counting(1), (X,)), "attribute", "attribute calls")
    traced = torch.fx.symbolic_trace(Counting(0))
    assert_only(verify(traced, Counting(1), (X,)), "attribute", "attribute calls")
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

    assert_only(verify(Loose(2), Loose(1), (X,)), "attribute", "attribute seen")


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


def test_a_run_that_unties_two_buffers_equals_itself_and_not_one_that_writes_to_both() -> None:
    class Tied(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(2))
            self.register_buffer("second", self.first)
            self.in_place = in_place

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.in_place:
                self.first.add_(1)
            else:
                self.first = self.first + 1
            return x * 2

    x = torch.ones(2)
    verify(Tied(False), Tied(False), (x,)).check()
    assert not verify(Tied(True), Tied(False), (x,)).ok
    assert not verify(Tied(False), Tied(True), (x,)).ok
