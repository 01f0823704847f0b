"""Sparse gradients of embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partita.ddp import replicate
from partita.errors import SignatureMismatch
from partita.planning import Cluster
from partita.runtime import InProcessWorld

ROWS = {0: [3, 1, 1], 1: [1, 4, 0]}
"""What each rank looks up; padding is 0."""


class Bags(nn.Module):
    """Two sparse embeddings, of which a rank may leave one out, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(6, 4, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(5, 4, sparse=True, mode="sum")
        self.never = nn.Embedding(2, 4, sparse=True)

    def forward(self, rows: torch.Tensor, *, with_bag: bool) -> torch.Tensor:
        summed = self.one(rows)
        return (summed + self.bag(rows.view(-1, 1)) if with_bag else summed).square().sum()


def _loss(module: Any, rank: int) -> torch.Tensor:
    loss: torch.Tensor = module(torch.tensor(ROWS[rank]), with_bag=rank == 1)
    return loss


def test_means_are_sparse_and_those_of_dense_gradients() -> None:
    torch.manual_seed(0)
    state = Bags().state_dict()

    def module_of(comm: Any) -> Any:
        module = Bags()
        module.load_state_dict(state)
        return replicate(module, comm)

    def body(comm: Any) -> list[torch.Tensor | None]:
        module = module_of(comm)
        for _ in range(2):  # the second pass adds to the mean of the first
            _loss(module, comm.rank).backward()
        return [parameter.grad for parameter in module.parameters()]

    whole = Bags()
    whole.load_state_dict(state)
    for _ in range(2):
        ((_loss(whole, 0) + _loss(whole, 1)) / 2).backward()
    for gradients in InProcessWorld(2).run(body):
        for gradient, parameter in zip(gradients, whole.parameters(), strict=True):
            if parameter.grad is None:
                assert gradient is None
                continue
            assert gradient is not None
            assert gradient.layout is torch.sparse_coo
            assert gradient.is_coalesced()
            assert torch.equal(gradient.indices(), parameter.grad.coalesce().indices())
            torch.testing.assert_close(gradient.to_dense(), parameter.grad.to_dense())


def test_a_batch_without_rows_gives_an_empty_gradient() -> None:
    def body(comm: Any) -> torch.Tensor | None:
        module: Any = replicate(nn.Embedding(3, 2, sparse=True), comm)
        module(torch.empty(0, dtype=torch.int64)).sum().backward()
        gradient: torch.Tensor | None = module.weight.grad
        return gradient

    for gradient in InProcessWorld(2).run(body):
        assert gradient is not None
        assert gradient.layout is torch.sparse_coo
        assert not gradient.to_dense().any()


def test_a_plan_leaves_them_to_their_own_buckets() -> None:
    def body(comm: Any) -> list[tuple[str, ...]]:
        module: Any = replicate(nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1)), comm)

        def step() -> None:
            module.zero_grad()
            module(torch.tensor([comm.rank])).sum().backward()

        with module.replication.measuring():
            for _ in range(4):
                step()
        module.replication.use(module.replication.plan(Cluster(2)))
        step()
        assert module[0].weight.grad.to_dense()[:2].count_nonzero() == 8
        return [bucket.names for bucket in module.replication.reducer.buckets]

    for buckets in InProcessWorld(2).run(body):
        assert buckets[-1] == ("0.weight",)
        assert sorted(name for bucket in buckets[:-1] for name in bucket) == ["1.bias", "1.weight"]


def test_ranks_that_disagree_on_what_is_sparse_are_told_so_before_anything_is_sent() -> None:
    def body(comm: Any) -> None:
        with pytest.raises(SignatureMismatch, match="sparse gradients"):
            replicate(nn.Embedding(3, 2, sparse=comm.rank == 1), comm)

    InProcessWorld(2).run(body)
