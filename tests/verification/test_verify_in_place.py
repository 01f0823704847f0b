"""In-place writes to arguments."""

from __future__ import annotations

from tests.verification.nets import X, assert_only, kinds

from partita.verification import verify


def test_a_changed_argument_must_be_changed_alike() -> None:
    assert_only(verify(lambda x: x.add_(1).sum(), lambda x: (x + 1).sum(), (X,)), "input", "args[0]")
    assert_only(verify(lambda x: (x + 1).sum(), lambda x: x.add_(1).sum(), (X,)), "input", "args[0]")
    assert verify(lambda x: x.add_(1).sum(), lambda x: x.add_(1).sum(), (X,)).ok


def test_a_list_that_grew_is_reported() -> None:
    def grow(items: list[int]) -> None:
        items.append(1)

    mine: list[int] = []
    assert_only(verify(lambda items: None, grow, (mine,)), "input", "args[0]")
    assert mine == []


def test_an_argument_with_a_history_can_be_written_to_in_place() -> None:
    leaf = X.clone().requires_grad_()
    computed = leaf * 2
    assert verify(lambda x: x.mul_(3), lambda x: x.mul_(3), (computed,)).compared["gradients of inputs"] == 1
    result = verify(lambda x: x.mul_(3), lambda x: x.mul_(3).detach(), (computed,))
    assert "gradient" in kinds(result)
    assert leaf.grad is None
