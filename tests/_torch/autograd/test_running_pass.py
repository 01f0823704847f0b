from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita._torch.autograd.running_pass import (
    accumulator,
    at_end_of_pass,
    compiled_nodes,
    current_node,
    current_pass,
    grad_version,
    inside_another_pass,
    leaves_after,
    storage_users,
    takes_gradient,
    will_reach,
)


def seen_in_backward(look: Any, loss: torch.Tensor, parameter: nn.Parameter, **how: Any) -> list[Any]:
    """What ``look`` gives when the gradient of ``parameter`` has been added."""
    observed: list[Any] = []
    handle = parameter.register_post_accumulate_grad_hook(lambda _: observed.append(look()))
    loss.backward(**how)
    handle.remove()
    return observed


def test_a_pass_has_a_number_and_a_node_only_while_it_runs() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert current_pass() == -1
    assert current_node() is None
    (during,) = seen_in_backward(lambda: (current_pass(), current_node()), weight.sum(), weight)
    assert during[0] >= 0
    assert during[1] is not None


def test_it_is_known_which_leaves_a_pass_will_reach() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    nodes = [accumulator(used), accumulator(unused)]
    loss = (used * 2).sum() + 0 * unused.sum()
    look = lambda: [will_reach(node) for node in nodes]  # noqa: E731
    assert seen_in_backward(look, (used * 2).sum(), used) == [[True, False]]
    assert seen_in_backward(look, loss, used, inputs=[used]) == [[True, False]]


def test_a_pass_of_autograd_grad_fills_nothing() -> None:
    weight = nn.Parameter(torch.ones(2))
    node = accumulator(weight)
    reached = []
    doubled = weight * 2
    doubled.register_hook(lambda _: reached.append(will_reach(node)))
    torch.autograd.grad(doubled.sum(), [weight], retain_graph=True)
    torch.autograd.grad(doubled.sum(), [doubled], retain_graph=True)
    doubled.sum().backward()
    assert reached == [False, False, True]


def test_what_runs_at_the_end_of_a_pass_finds_all_gradients_and_may_raise() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = []

    def finish() -> None:
        gradients.append((first.grad is not None, second.grad is not None))
        raise ValueError("the end")

    first.register_post_accumulate_grad_hook(lambda _: at_end_of_pass(finish))
    try:
        (first + second).sum().backward()
    except ValueError as error:
        gradients.append(str(error))
    assert gradients == [(True, True), "the end"]


def test_a_pass_within_a_pass_is_seen() -> None:
    inner, outer = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    for reentrant in (True, False):
        loss = (checkpoint(lambda value: value * inner, x, use_reentrant=reentrant) * outer).sum()
        nested: list[Any] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_note_nesting, nested))
            for parameter in (inner, outer)
        ]
        loss.backward()
        for handle in handles:
            handle.remove()
        assert dict(nested) == {id(inner): reentrant, id(outer): False}


def _note_nesting(nested: list[Any], parameter: torch.Tensor) -> None:
    nested.append((id(parameter), inside_another_pass()))


def test_nodes_of_compiled_graphs_are_found_with_their_leaves() -> None:
    weight = nn.Parameter(torch.ones(2))
    x = torch.ones(2)
    result = torch.compile(lambda x: (x * weight).sin(), backend="aot_eager")(x)
    (node,) = compiled_nodes([result.view(1, 2), None, x])
    assert [leaf is weight for leaf in leaves_after(node) if leaf is not None] == [True]
    assert compiled_nodes([(x * weight).sin()]) == []


def test_writes_to_a_gradient_are_seen() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = grad_version(weight)
    weight.sum().backward()
    first = grad_version(weight)
    weight.sum().backward()
    assert len({before, first, grad_version(weight)}) == 3


def test_tensors_that_share_a_storage_are_counted() -> None:
    flat = torch.zeros(4)
    assert storage_users(flat) == 1
    view = flat[:2]
    assert storage_users(flat) == 2
    del view
    assert storage_users(flat) == 1


def test_a_backward_pass_starts_from_all_that_requires_a_gradient_but_views_taken_without() -> None:
    weight = nn.Parameter(torch.ones(4))
    computed = weight * 2
    with torch.no_grad():
        views = [weight[1:], computed[1:], computed[1:][1:]]
    assert all(view.requires_grad for view in views)
    assert not any(map(takes_gradient, [*views, computed.detach(), torch.ones(2)]))
    assert all(map(takes_gradient, [weight, computed, weight[1:], computed.detach().requires_grad_()]))
