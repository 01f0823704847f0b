"""Padding buckets: a few recordings for every batch size, and only where rows keep apart."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import capturing
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from partita.cudagraphs import CudaGraphsBackend
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.padding import PaddedGraph
from partita.cudagraphs.padding.padding import plan_padding
from partita.errors import ArgumentError


class Decoder(nn.Module):
    """One step of decoding with a cache, as a server runs it: batch first, tokens second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, token: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, ...]:
        x = self.table(token)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        seen = functional.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return self.head(x[:, -1]).softmax(-1), keys, values


def request(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randint(11, (rows, 1), generator=generator),
        torch.randn(rows, 2, 5, 4, generator=generator),
        torch.randn(rows, 2, 5, 4, generator=generator),
    )


def padded(args: tuple[torch.Tensor, ...], size: int) -> tuple[torch.Tensor, ...]:
    rows = [min(row, len(args[0]) - 1) for row in range(size)]
    return tuple(arg[rows] for arg in args)


def recordings(backend: CudaGraphsBackend) -> int:
    return sum(info.recorded for graph in backend.graphs for info in graph.cache_info().values())


def test_eight_recordings_serve_every_batch_of_a_server() -> None:
    """Batches of 2 to 64; a batch of 1 has a graph of its own."""
    torch.manual_seed(0)
    model = Decoder().eval()
    buckets = (8, 16, 24, 32, 40, 48, 56, 64)
    backend = capturing(buckets=buckets)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    sizes = [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48, 48, 56, 56, 64, 64, *range(2, 65, 3)]
    with torch.no_grad():
        for rows in sizes:
            args = request(rows)
            actual = compiled(*args)
            bucket = next(size for size in buckets if size >= rows)
            expected = model(*padded(args, bucket))
            for ours, theirs, unpadded in zip(actual, expected, model(*args), strict=True):
                assert torch.equal(ours, theirs[:rows])  # bit for bit those of the padded batch
                torch.testing.assert_close(ours, unpadded)
                assert ours.stride() == unpadded.stride()
    assert len(backend.graphs) == 1
    assert recordings(backend) == 8
    assert isinstance(backend.graphs[0].padding, PaddedGraph)
    assert backend.graphs[0].padding.padded_calls == len(sizes)


def test_results_are_the_callers_to_keep() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend=capturing(buckets=(4, 8)), dynamic=True)
    with torch.no_grad():
        batches = [torch.randn(rows, 4) for rows in (3, 3, 4, 2, 3, 7, 5)]
        results = [compiled(x) for x in batches]
        for x, result in zip(batches, results, strict=True):
            torch.testing.assert_close(result, model(x))


def test_larger_batches_are_not_padded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    backend = capturing(buckets=(4,))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (3, 9, 9, 3, 9):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), model(x))
    assert backend.graphs[0].padding.padded_calls == 2


def test_inputs_that_are_written_are_written_in_their_rows_only() -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.sin())
        return total * 2

    backend = capturing(buckets=(4, 8))
    compiled = torch.compile(step, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (3, 3, 2, 5, 3):
            x = torch.randn(rows, 2)
            ours, theirs = torch.ones(rows, 2), torch.ones(rows, 2)
            assert torch.equal(compiled(x, ours), step(x, theirs))
            assert torch.equal(ours, theirs)
    assert isinstance(backend.graphs[0].padding, PaddedGraph)


def test_sizes_that_are_returned_are_those_of_the_batch() -> None:
    compiled = torch.compile(
        lambda x: (x.sin().view(-1), x.t().contiguous(), x.shape[0]),
        backend=capturing(buckets=(8,)),
        dynamic=True,
    )
    with torch.no_grad():
        for rows in (3, 3, 5):
            x = torch.randn(rows, 2)
            flat, turned, size = compiled(x)
            assert size == rows
            assert torch.equal(flat, x.sin().view(-1))
            assert torch.equal(turned, x.t())
            assert turned.stride() == (rows, 1)


MIXING: list[tuple[Callable[..., torch.Tensor], str]] = [
    (lambda x: x - x.mean(0), "mean.*works along the batch"),
    (lambda x: x / x.sum(), "sum.*(works along all dimensions|nobody knows)"),
    (lambda x: x.t() @ x, "mm.*it sums over the batch"),
    (lambda x: x @ x.t(), "mm.*multiplies rows with each other"),
    (lambda x: x.softmax(0), "softmax.*works along the batch"),
    (lambda x: x * x.shape[0], "mul.*takes the batch size as a number"),
    (lambda x: torch.addmm(x, x, torch.eye(4), alpha=x.shape[0]), "takes the batch size as a number"),
    (lambda x: x.flip(0), "flip.*works along the batch"),
    (lambda x: x.cumsum(0), "cumsum.*works along the batch"),
    (lambda x: x[1:], "slice.*works along the batch"),
    (lambda x: torch.cat([x, x]), "cat.*joins along the batch"),
    (lambda x: functional.dropout(x, 0.5, True), "random numbers"),
    (lambda x: x + torch.rand_like(x), "random numbers"),
    (lambda x: x.view(2, -1), "laid? out|lays out|nobody knows"),
    (lambda x: functional.batch_norm(x, None, None, training=True), "nobody knows"),
    (lambda x: x[x.argmax(0)], "along the batch"),
    (lambda x: x.t().argmax() + x, "all dimensions"),
    (lambda x: x.t().sum() * x, "all dimensions|nobody knows"),
    (lambda x: x.sort(0)[0], "along the batch"),
    (lambda x: x + torch.arange(x.shape[0], 0, -1)[:, None], "'start' depends on the batch size"),
    (lambda x: torch.full_like(x, x.shape[0]), "nobody knows|the batch size"),
    (lambda x: x[torch.arange(x.shape[0]) * 0], "picks rows of the batch"),
    (lambda x: x.roll(1, 0), "nobody knows|along the batch"),
    (lambda x: x.tril(), "triangle"),
    (lambda x: torch.bmm(x[None], x.t()[None]), "multiplies rows"),
    (lambda x: functional.layer_norm(x.t().contiguous(), (x.shape[0],)), "normalises over the batch"),
]


def symbolic(function: Callable[..., Any]) -> torch.fx.GraphModule:
    """The graph of a function of one batch, whose size is a symbol."""
    with torch.no_grad():
        return make_fx(lambda x: (function(x.sin()),), tracing_mode="symbolic")(torch.randn(6, 4))


def plan(gm: torch.fx.GraphModule, *buckets: int) -> PaddedGraph | str:
    return plan_padding(gm, "inference", gm, buckets, assume=False, memory=StableMemory())


@pytest.mark.parametrize(("function", "reason"), MIXING)
def test_a_graph_that_mixes_rows_is_not_padded_and_says_where(
    function: Callable[..., torch.Tensor], reason: str
) -> None:
    why = plan(symbolic(function), 4, 8)
    assert isinstance(why, str)
    assert re.search(reason, why), why


def test_what_is_not_padded_runs_as_it_is_and_one_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    backend = capturing(buckets=(4, 8))
    compiled = torch.compile(lambda x: x - x.mean(0), backend=backend, dynamic=True)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "partita.cudagraphs"):
        for rows in (6, 4, 6, 4):
            x = torch.randn(rows, 4)
            assert torch.equal(compiled(x), x - x.mean(0))
    assert "works along the batch" in str(backend.graphs[0].padding)
    assert "test_padding.py" in str(backend.graphs[0].padding)
    assert [record.levelno for record in caplog.records if "is not padded" in record.message] == [30]


APART: list[Callable[..., Any]] = [
    lambda x: x.sin() + torch.arange(x.shape[0])[:, None],
    lambda x: x.mean(1, keepdim=True) - x.amax(1, keepdim=True),
    lambda x: x.softmax(-1).log_softmax(1),
    lambda x: x.t().contiguous().softmax(0).t(),
    lambda x: x.view(-1).view(x.shape[0], 2, 2).transpose(1, 2).reshape(-1, 2).sin(),
    lambda x: torch.cat([x, x.cos()], 1).split(3, 1)[1],
    lambda x: torch.stack([x, x.cos()], 0).unbind(0)[1],
    lambda x: torch.stack([x, x.cos()], 2).squeeze(0).sum((1, 2)),
    lambda x: x.topk(2, 1)[0] + x.sort(1)[0][:, :2],
    lambda x: x.gather(1, x.argsort(1)),
    lambda x: x[:, torch.tensor([2, 0])],
    lambda x: torch.arange(12.0).view(4, 3)[x.argmax(1)],
    lambda x: torch.baddbmm(x[:, None], x[:, None], torch.eye(4).expand(x.shape[0], 4, 4)),
    lambda x: torch.addmm(x, x, torch.eye(4)),
    lambda x: torch.mm(torch.eye(4), x.t()).t(),
    lambda x: functional.layer_norm(x, (4,)),
    lambda x: functional.group_norm(x.view(-1, 4, 1), 2).flatten(1),
    lambda x: functional.conv1d(x[:, None], torch.ones(2, 1, 2)).relu(),
    lambda x: torch.where(x > 0, x, torch.zeros_like(x)).cumsum(1).flip(1),
    lambda x: torch.zeros(x.shape[0], 2, 4).index_copy(1, torch.tensor([1]), x[:, None]),
    lambda x: x.unsqueeze(1).expand(-1, 3, -1).permute(1, 0, 2).select(0, 1),
    lambda x: x.view(-1, 2, 2).tril().amax((1, 2)),
]


@pytest.mark.parametrize("function", APART)
def test_a_graph_that_keeps_rows_apart_is_padded_and_right(function: Callable[..., Any]) -> None:
    runner = plan(symbolic(function), 4, 8)
    assert isinstance(runner, PaddedGraph), runner
    with torch.no_grad():
        for rows in (6, 3, 8, 2):
            x = torch.randn(rows, 4)
            (actual,) = runner(x)
            expected = function(padded((x,), 4 if rows <= 4 else 8)[0].sin())
            assert torch.equal(actual, expected[: len(actual)])
            unpadded = function(x.sin())
            torch.testing.assert_close(actual, unpadded)
            assert actual.stride() == unpadded.stride()


def test_training_is_not_padded() -> None:
    model = nn.Linear(3, 3)
    backend = capturing(buckets=(8,))
    torch.compile(model, backend=backend, dynamic=True)(torch.randn(5, 3)).sum().backward()
    assert "the gradients of weights are sums over the batch" in str(backend.graphs[0].padding)


def test_without_sizes_that_change_there_is_nothing_to_pad() -> None:
    backend = capturing(buckets=(8,))
    with torch.no_grad():
        torch.compile(torch.sin, backend=backend, dynamic=False)(torch.randn(5, 3))
    assert "no input has a size there that may change: compile with dynamic=True" in str(
        backend.graphs[0].padding
    )


def hidden(x: torch.Tensor) -> torch.Tensor:
    """Keeps rows apart, in a way that no rule can see."""
    return x.sin() + (x - x.mean(0)) * 0


def test_the_users_word_is_taken_and_checked() -> None:
    backend = capturing(buckets=(4, 8), rows_apart=True)
    compiled = torch.compile(hidden, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (3, 3, 7, 7, 2, 3):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), hidden(x))
    padding = backend.graphs[0].padding
    assert isinstance(padding, PaddedGraph)
    assert not padding.gave_up
    assert recordings(backend) == 2


def test_a_word_that_does_not_hold_is_found_out_and_the_results_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def centred(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)).sin()

    backend = capturing(buckets=(4, 8), rows_apart=True)
    compiled = torch.compile(centred, backend=backend, dynamic=True)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "partita.cudagraphs"):
        for rows in (3, 3, 7, 3):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), centred(x))
    assert "rows_apart=True does not hold: padded to 4" in caplog.text
    assert backend.graphs[0].padding.padded_calls == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": (8, 4)}, r"buckets are \(8, 4\): give sizes of 1 or more in rising order"),
        ({"buckets": (0, 4)}, "give sizes of 1 or more"),
        ({"buckets": range(1, 20)}, "19 buckets need a recording each, and max_recordings is 8"),
    ],
)
def test_buckets_that_can_not_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CudaGraphsBackend(**options)
