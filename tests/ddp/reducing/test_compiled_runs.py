"""Which parameters the nodes of compiled graphs hand gradients to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partita.ddp.reducing.compiled_runs import CompiledRuns


class Double(torch.autograd.Function):
    """Its node is made in Python, as those of compiled graphs are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


def test_a_node_is_followed_to_the_parameters_that_count() -> None:
    first, second, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
    runs = CompiledRuns([first, second])
    assert runs.indices_after((second * other).grad_fn) == [1, None]
    assert runs.indices_after((first * torch.ones(2)).grad_fn) == [0, None]


def test_offers_are_counted_for_the_nodes_that_the_pass_will_run() -> None:
    parameter = nn.Parameter(torch.ones(2))
    runs = CompiledRuns([parameter])
    products = [Double.apply(parameter) for _ in range(3)]
    for product in products:
        runs.add(product.grad_fn)
    runs.add(products[1].grad_fn)  # known already: a graph after it was given its result
    seen = []
    total = (products[0] + products[1]).sum()
    total.register_hook(lambda _: seen.append(dict(runs.offers_to_come())))
    total.backward()
    assert seen == [{0: 2}]


def test_nodes_that_are_gone_do_not_count() -> None:
    parameter = nn.Parameter(torch.ones(2))
    runs = CompiledRuns([parameter])
    runs.add(Double.apply(parameter).grad_fn)
    seen = []
    total = (parameter * 3.0).sum()
    total.register_hook(lambda _: seen.append(dict(runs.offers_to_come())))
    total.backward()
    assert seen == [{}]
