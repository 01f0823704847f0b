"""Gradients of parameters and arguments."""

from __future__ import annotations

import copy

import torch
from tests.verification.nets import Copy, WrongBackward, WrongCopy, X, assert_only, kinds, make_net
from torch import nn

from partita.verification import verify

GLOBAL = torch.ones(4, requires_grad=True)


def test_right_outputs_with_wrong_gradients_are_reported() -> None:
    assert_only(verify(WrongCopy(), Copy(), (X.clone().requires_grad_(),)), "gradient", "gradient of args[0]")
    net = make_net()
    result = verify(lambda x: {k: WrongBackward.apply(v) for k, v in net(x).items()}, net, (X,))
    assert kinds(result) == {"gradient"}
    assert result.differences[0].where == "gradient of inner.weight"


def test_no_gradient_is_not_a_gradient_of_zeros() -> None:
    net = nn.Linear(4, 2)
    result = verify(lambda x: net(x), lambda x: nn.functional.linear(x, net.weight) + net.bias.detach(), (X,))
    assert_only(result, "gradient", "gradient of bias")
    zero = verify(
        lambda x: net(x) + 0 * X.sum(), lambda x: nn.functional.linear(x, net.weight, net.bias * 1), (X,)
    )
    assert zero.ok
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    assert_only(
        verify(lambda a, b: a + 0 * b, lambda a, b: a + 0 * b.detach(), (x, y)),
        "gradient",
        "gradient of args[1]",
    )


def test_an_output_that_lost_its_history_is_reported() -> None:
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


def test_gradients_that_already_lie_there_are_added_to() -> None:
    net = nn.Linear(4, 2)
    net(X).sum().backward()

    def forgetful(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        return net(x)

    assert verify(net, net, (X,)).ok
    assert kinds(verify(forgetful, net, (X,))) == {"gradient"}


def test_a_gradient_for_a_parameter_that_the_reference_does_not_have_is_reported() -> None:
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


class Unregistered(nn.Module):
    """Trains what no module has a name for; ``detached`` lets no gradient arrive there."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weights
        return x @ first + 2 * (x @ (second.detach() if self.detached else second))


def test_gradients_of_tensors_without_a_name_are_compared() -> None:
    x = torch.randn(3, 2)
    result = verify(Unregistered(), Unregistered(), (x,))
    assert result.ok
    assert result.compared["gradients of parameters"] == 2
    model = Unregistered()
    lost = verify(Unregistered(detached=True), model, (x,))
    assert kinds(lost) == {"gradient"}
    assert "gradient of a tensor that the model has no name for" in str(lost)
    assert "candidate holds no such tensor, but the reference gives a gradient to it" in str(lost)
    more = verify(model, Unregistered(detached=True), (x,))
    assert "reference holds no such tensor, but the candidate gives a gradient to it" in str(more)
    assert [weight.grad for weight in model.weights] == [None, None]


def test_a_named_tensor_is_paired_with_one_without_a_name() -> None:
    class Named(Unregistered):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = self.weights

    assert verify(Named(), Unregistered(), (torch.randn(3, 2),)).ok


def test_what_a_run_makes_and_lets_require_gradients_is_not_compared() -> None:
    def makes_one(x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(4, requires_grad=True)

    assert verify(lambda x: (x * 1).requires_grad_() * 1, makes_one, (X,)).ok


def test_gradients_of_a_global_tensor_stay_as_they_were() -> None:
    before = GLOBAL.grad = torch.full_like(GLOBAL, 3)

    class UsesGlobal(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * GLOBAL

    assert verify(UsesGlobal(), UsesGlobal(), (X,)).ok
    assert GLOBAL.grad is before
    assert torch.equal(before, torch.full_like(GLOBAL, 3))
