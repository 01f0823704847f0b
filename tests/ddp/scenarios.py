"""What every rank of a world does to compare ``replicate`` with torch's DDP."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.ddp import models
from tests.ddp.models import batch, loss_of, seeded
from tests.own_functions import OwnFunctions
from torch import nn
from torch._inductor.exc import InductorError
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from partita.ddp import bf16_compress, fp16_compress, partita_ddp, replicate
from partita.runtime import Comm

SCENARIOS: dict[str, Callable[[int], None]] = {}
TINY_MB = 0.0005
"""A few hundred bytes: several buckets even for the models here."""


def scenario(function: Callable[[int], None]) -> Callable[[int], None]:
    SCENARIOS[function.__name__] = function
    return function


def run_all(comm: Comm, names: list[str]) -> dict[str, str]:
    """Run scenarios, and return the traceback of each that fails, by its name."""
    torch.set_num_threads(1)
    failures = {}
    for name in names:
        torch._dynamo.reset()
        try:
            SCENARIOS[name](comm.rank)
        except Exception:
            failures[name] = traceback.format_exc()
    return failures


Trainer = Callable[[Any, int], list[Any]]


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def ordinary(module: Any, rank: int, steps: int = 4) -> list[Any]:
    """Some steps of plain training; the gradients of each, and the state at the end."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    seen: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module(batch(step, rank))).backward()
        seen += gradients(module)
        optimizer.step()
    return [*seen, *(value.clone() for value in module.state_dict().values())]


def in_steps(count: int, run: Callable[[Any, int, int], None]) -> Trainer:
    """The gradients of so many steps without an optimizer.

    Args:
        run: the forward and the backward pass; is given the module, the step and the rank.
    """

    def train(module: Any, rank: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(count):
            module.zero_grad()
            run(module, step, rank)
            seen += gradients(module)
        return seen

    return train


def under_autocast(module: Any, step: int, rank: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(module(batch(step, rank)))
    loss.backward()


def of_several_sizes(module: Any, step: int, rank: int) -> None:
    loss_of(module(batch(step, rank, (6, 5, 9, 6, 7)[step] + 2 * rank))).backward()


def of_two_forwards(module: Any, step: int, rank: int) -> None:
    (loss_of(module(batch(step, rank))) + loss_of(module(batch(step + 50, rank)))).backward()


def assert_same(expected: list[Any], actual: list[Any]) -> None:
    """Gradients, or None where there is none, of the same bits and strides."""
    assert len(expected) == len(actual)
    for number, (left, right) in enumerate(zip(expected, actual, strict=True)):
        assert (left is None) == (right is None), f"value {number}: {left} expected, got {right}"
        if left is not None:
            assert left.stride() == right.stride(), f"value {number}"
            assert torch.equal(left, right), f"value {number}: {left} expected, got {right}"


def compare(
    make: Callable[[], nn.Module],
    rank: int,
    train: Trainer = ordinary,
    *,
    ways: tuple[str, ...] = ("eager", "compiled"),
    ddp: dict[str, Any] | None = None,
    hook: Any = None,
    dynamic: bool | None = None,
    **options: Any,
) -> None:
    """Train under DDP and under replicate, eager and compiled, from the same start."""
    reference = DistributedDataParallel(seeded(make), bucket_cap_mb=1, **(ddp or {}))
    if hook is not None:
        reference.register_comm_hook(None, hook)
    expected = train(reference, rank)
    for way in ways:
        module: Any = replicate(seeded(make), bucket_cap_mb=TINY_MB, inner="aot_eager", **options)
        assert list(module.state_dict()) == list(reference.module.state_dict())
        run = module if way == "eager" else torch.compile(module, backend=partita_ddp, dynamic=dynamic)
        assert_same(expected, train(run, rank))
        assert len(module.replication.reducer.buckets) > 1, "a single bucket tests little"
        module.replication.close()


@scenario
def plain(rank: int) -> None:
    compare(models.mlp, rank)


def against_inductor(
    make: Callable[[], nn.Module],
    rank: int,
    train: Trainer = ordinary,
    *,
    dynamic: bool | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-7,
) -> None:
    """Both sides compiled with Inductor. Kernels that are fused otherwise add in another order, so this is
    equal but for rounding.
    """
    with torch._dynamo.config.patch(optimize_ddp=False):
        reference = DistributedDataParallel(seeded(make), bucket_cap_mb=1)
        expected = train(torch.compile(reference, dynamic=dynamic), rank)
    module: Any = replicate(seeded(make), bucket_cap_mb=TINY_MB)
    actual = train(torch.compile(module, backend=partita_ddp, dynamic=dynamic), rank)
    assert len(module.replication.reducer.buckets) > 1, "a single bucket tests little"
    for left, right in zip(expected, actual, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)


def two_blocks() -> nn.Module:
    """Fewer kernels, each of which a C++ compiler works at for seconds."""
    return models.mlp(2)


@scenario
def inductor_with_dynamic_shapes(rank: int) -> None:
    """One size first, then others on other ranks and in other steps, as Dynamo finds out by itself."""
    against_inductor(two_blocks, rank, in_steps(5, of_several_sizes))


@scenario
def inductor_told_of_dynamic_shapes(rank: int) -> None:
    against_inductor(models.mlp, rank, in_steps(5, of_several_sizes), dynamic=True)


@scenario
def inductor_with_convolutions_and_attention(rank: int) -> None:
    against_inductor(models.Mixer, rank, rtol=1e-5, atol=1e-6)


@scenario
def a_smaller_last_batch_on_one_rank(rank: int) -> None:
    """One row leaves other operators in the graph than six do, and its shapes are compiled for themselves."""

    def run(module: Any, step: int, rank: int) -> None:
        loss_of(module(batch(step, rank, 1 if rank and step == 2 else 6))).backward()

    compare(models.Placed, rank, in_steps(4, run), dynamic=False)


@scenario
def operators_with_several_gradients(rank: int) -> None:
    compare(models.Mixer, rank)


@scenario
def inductor_under_autocast(rank: int) -> None:
    """A rounding of bfloat16 may fall to the other side, and everything after it with it."""
    against_inductor(two_blocks, rank, in_steps(3, under_autocast), rtol=2**-6, atol=2**-10)


def _nothing(*_args: Any) -> None:
    """Dynamo traces this; it would break the graph at a mock."""


@contextmanager
def flex_attention_trained_on_cpu() -> Iterator[None]:
    """Torch refuses it in the Python function, though the operator has a backward pass on CPUs."""
    with patch.object(sys.modules["torch.nn.attention.flex_attention"], "_validate_device", _nothing):
        yield


@scenario
def flex_attention(rank: int) -> None:
    with flex_attention_trained_on_cpu():
        compare(models.Flexible, rank)


@scenario
def flex_attention_with_inductor(rank: int) -> None:
    """Torch 2.13 has no CPU template for its backward pass, with or without data parallelism."""

    def error_of(run: Any) -> str:
        try:
            ordinary(run, rank)
        except InductorError as error:
            return str(error)
        return ""

    with flex_attention_trained_on_cpu():
        theirs = error_of(torch.compile(seeded(models.Flexible)))
        if not theirs:
            against_inductor(models.Flexible, rank)
            return
        module: Any = replicate(seeded(models.Flexible), bucket_cap_mb=TINY_MB)
        assert error_of(torch.compile(module, backend=partita_ddp)) == theirs


@scenario
def strides(rank: int) -> None:
    compare(models.Transposed, rank, ddp={"find_unused_parameters": True})


@scenario
def kept_gradients(rank: int) -> None:
    """Gradients that are set to zero, not to None, stay the same tensors."""

    def train(module: Any, rank: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            before = [p.grad for p in module.parameters()]
            module.zero_grad(set_to_none=False)
            loss_of(module(batch(step, rank))).backward()
            if step and any(p.grad is not b for p, b in zip(module.parameters(), before, strict=True)):
                raise AssertionError("another tensor")
            seen += gradients(module)
        return seen

    compare(models.mlp, rank, train)


@scenario
def retained_gradients(rank: int) -> None:
    """A gradient that the user keeps does not change in the next step."""

    def train(module: Any, rank: int) -> list[Any]:
        kept, seen = [], []
        for step in range(4):
            module.zero_grad()
            loss_of(module(batch(step, rank))).backward()
            kept += [p.grad for p in module.parameters()]
            seen += gradients(module)
        assert all(torch.equal(a, b) for a, b in zip(kept, seen, strict=True))
        return seen

    compare(models.mlp, rank, train)


@scenario
def accumulation(rank: int) -> None:
    """Passes that are not synchronised, and passes that are, without zero_grad in between."""

    def train(module: Any, rank: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(9):
            if step == 5:
                module.zero_grad()
            sync = step % 3 == 2 or step > 6
            with nullcontext() if sync else module.no_sync():
                loss_of(module(batch(step, rank))).backward()
            if sync:
                seen += gradients(module)
        return seen

    compare(models.mlp, rank, train)


class TwoSparse(nn.Module):
    """Sparse embeddings before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8, sparse=True)
        self.bag = nn.EmbeddingBag(30, 8, sparse=True, mode="sum")
        self.out = nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.words(rows).mean(1) + self.bag(rows % 30))
        return result


@scenario
def sparse_gradients(rank: int) -> None:
    """Two passes a step, of which the first is not synchronised in every other step."""

    def train(module: Any, rank: int) -> list[Any]:
        owner = getattr(module, "module", module)
        optimizers = [
            torch.optim.SparseAdam([owner.words.weight, owner.bag.weight], 0.1),
            torch.optim.Adam(owner.out.parameters(), 0.1),
        ]
        seen: list[Any] = []
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for half in range(2):
                drawn = torch.Generator().manual_seed(100 * step + 10 * half + rank)
                with module.no_sync() if step % 2 and not half else nullcontext():
                    loss_of(module(torch.randint(40, (4, 3), generator=drawn))).backward()
            seen += [parameter.grad.to_dense() for parameter in owner.parameters()]
            for optimizer in optimizers:
                optimizer.step()
        return [*seen, *(value.clone() for value in owner.state_dict().values())]

    compare(TwoSparse, rank, train)


@scenario
def local_gradients(rank: int) -> None:
    """Within no_sync nothing is reduced."""

    def train(module: Any, rank: int) -> list[Any]:
        with module.no_sync():
            loss_of(module(batch(0, rank))).backward()
        return gradients(module)

    compare(models.mlp, rank, train)


@scenario
def unused_always(rank: int) -> None:
    compare(models.WithUnused, rank, ddp={"find_unused_parameters": True})


@scenario
def unused_by_step_and_rank(rank: int) -> None:
    def run(module: Any, step: int, rank: int) -> None:
        inside = module.module if isinstance(module, DistributedDataParallel) else module
        inside.which = (step // 2 if step % 2 else step // 2 + rank) % 3
        loss_of(module(batch(step, rank))).backward()

    unused = {"find_unused_parameters": True}
    compare(models.Branching, rank, in_steps(8, run), ddp=unused)


@scenario
def graph_break(rank: int) -> None:
    compare(models.Broken, rank)


@scenario
def tied_across_a_graph_break(rank: int) -> None:
    compare(lambda: models.Broken(tied=True), rank)


@scenario
def functions_of_the_users_own(rank: int) -> None:
    """Their backward passes are no derivatives."""
    compare(lambda: OwnFunctions(models.WIDTH), rank)


@scenario
def tied(rank: int) -> None:
    compare(models.Tied, rank)


@scenario
def mixed_dtypes(rank: int) -> None:
    compare(models.Mixed, rank)


@scenario
def buffers(rank: int) -> None:
    compare(models.Normed, rank)


@scenario
def evaluation_on_all_ranks(rank: int) -> None:
    """With the statistics of rank 0, as under DDP; and with those that are loaded after a step."""

    def train(module: Any, rank: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            module.zero_grad()
            module.train()
            loss_of(module(batch(step, rank))).backward()
            seen += gradients(module)
            module.eval()
            if step == 2:
                inside = getattr(module, "_orig_mod", module)
                inside = getattr(inside, "module", inside)
                inside.norm.load_state_dict(
                    {k: v + 1 for k, v in seeded(models.Normed).norm.state_dict().items()}
                )
            with torch.no_grad() if step % 2 else torch.inference_mode():
                seen.append(module(batch(9, 0)).clone())
        return seen

    compare(models.Normed, rank, train)


@scenario
def evaluation_on_one_rank(rank: int) -> None:
    """Rank 0 validates alone, and looks at gradients in training mode; the others wait at a barrier."""

    def train(module: Any, rank: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(5):
            module.zero_grad()
            loss_of(module(batch(step, rank))).backward()
            seen += gradients(module)
            if rank == 0 and not isinstance(module, DistributedDataParallel):
                module.eval()
                with torch.no_grad():
                    module(batch(9, 0))
                module(batch(9, 0).requires_grad_()).sum()
                module.train()
                with getattr(module, "_orig_mod", module).local(), torch.no_grad():
                    module(batch(9, 0))
                with getattr(module, "_orig_mod", module).local():
                    loss_of(module(batch(9, 0))).backward()
            dist.barrier()
        return seen

    compare(models.Normed, rank, train)


@scenario
def buffers_set_anew(rank: int) -> None:
    compare(models.MovingMean, rank)


@scenario
def buffers_sent_between_forward_and_backward(rank: int) -> None:
    """Batch normalisation has its statistics changed by the second forward pass, and runs backward."""
    compare(models.Normed, rank, in_steps(4, of_two_forwards))


@scenario
def fp16_hook(rank: int) -> None:
    compare(models.mlp, rank, hook=default_hooks.fp16_compress_hook, comm_hook=fp16_compress)


@scenario
def bf16_hook(rank: int) -> None:
    """DDP refuses torch's hook where there is no GPU, though gloo sums bfloat16; by another name it takes
    it.
    """

    def as_theirs(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, but not as text
        return default_hooks.bf16_compress_hook(state, bucket)

    compare(models.mlp, rank, hook=as_theirs, comm_hook=bf16_compress)


@scenario
def checkpointed_blocks(rank: int) -> None:
    compare(models.Checkpointed, rank)


@scenario
def checkpointed_whole(rank: int) -> None:
    compare(lambda: models.Checkpointed(whole=True), rank)


@scenario
def reentrant_checkpoints(rank: int) -> None:
    def run(module: Any, step: int, rank: int) -> None:
        loss_of(module(batch(step, rank).requires_grad_())).backward()

    compare(lambda: models.Checkpointed(reentrant=True), rank, in_steps(3, run), ways=("eager",))


@scenario
def reentrant_checkpoints_that_are_not_reduced(rank: int) -> None:
    def run(module: Any, step: int, rank: int) -> None:
        with module.no_sync():
            loss_of(module(batch(step, rank).requires_grad_())).backward()
        loss_of(module(batch(step + 9, rank).requires_grad_())).backward()

    compare(lambda: models.Checkpointed(reentrant=True), rank, in_steps(3, run), ways=("eager",))


@scenario
def graphs_that_write_to_their_inputs(rank: int) -> None:
    """The backward pass of such a graph is known by no result of it; both gradients of its layer count."""
    compare(models.WritesOn, rank)


@scenario
def autocast(rank: int) -> None:
    compare(models.mlp, rank, in_steps(3, under_autocast))


@scenario
def dynamic_shapes(rank: int) -> None:
    """Other sizes on other ranks and in other steps."""
    compare(models.mlp, rank, in_steps(5, of_several_sizes), dynamic=True)
    compare(models.mlp, rank, in_steps(5, of_several_sizes))


@scenario
def part_of_the_outputs(rank: int) -> None:
    def run(module: Any, step: int, rank: int) -> None:
        left, right, _ = module(batch(step, rank))
        loss_of((left, right)[step % 2]).backward()

    # a compiled graph gives zeros where DDP gives None to the head that is left out
    compare(models.TwoHeads, rank, in_steps(5, run), ways=("eager",), ddp={"find_unused_parameters": True})


@scenario
def two_forwards(rank: int) -> None:
    compare(models.mlp, rank, in_steps(4, of_two_forwards))


@scenario
def used_outside_too(rank: int) -> None:
    """A penalty on the weights goes around the module."""

    def run(module: Any, step: int, rank: int) -> None:
        penalty = 0.1 * sum(p.square().sum() for p in module.parameters())
        (loss_of(module(batch(step, rank))) + penalty).backward()

    compare(models.mlp, rank, in_steps(4, run))


@scenario
def hooks_of_the_user(rank: int) -> None:
    """Hooks on gradients see them before they are averaged."""

    def train(module: Any, rank: int) -> list[Any]:
        seen: list[Any] = []
        parameters = list(module.parameters())
        parameters[1].register_hook(lambda g: g.clamp(-0.001, 0.001))
        parameters[2].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(4):
            module.zero_grad()
            loss_of(module(batch(step, rank))).backward()
            seen += gradients(module)
        return seen

    compare(models.mlp, rank, train)


@scenario
def backward_twice(rank: int) -> None:
    """DDP leaves the second backward pass of one forward pass on its rank; here each is averaged."""
    reference = seeded(models.TwoHeads)
    for other in range(dist.get_world_size()):
        left, right, _ = reference(batch(0, other))
        for loss in (loss_of(left), loss_of(right) + loss_of(left)):
            (loss / dist.get_world_size()).backward(retain_graph=True)
    for way in ("eager", "compiled"):
        module: Any = replicate(seeded(models.TwoHeads), bucket_cap_mb=TINY_MB, inner="aot_eager")
        run = module if way == "eager" else torch.compile(module, backend=partita_ddp)
        for _ in range(3):
            module.zero_grad()
            left, right, _ = run(batch(0, rank))
            loss_of(left).backward(retain_graph=True)
            (loss_of(right) + loss_of(left)).backward()
            for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
    wrapped = DistributedDataParallel(seeded(models.TwoHeads), find_unused_parameters=True)
    left, right, _ = wrapped(batch(0, rank))
    loss_of(left).backward(retain_graph=True)
    (loss_of(right) + loss_of(left)).backward()
    theirs_right = all(
        torch.allclose(a.grad, b.grad)
        for a, b in zip(wrapped.parameters(), reference.parameters(), strict=True)
    )
    assert not theirs_right, "torch has learnt it"


@scenario
def hooks_that_change_gradients(rank: int) -> None:
    """What they leave in ``grad`` is averaged, for the gradient that completes a bucket too."""

    def train(module: Any, rank: int) -> list[Any]:
        def halve(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        return ordinary(module, rank)

    compare(models.mlp, rank, train)


@scenario
def gradients_of_some_without_backward(rank: int) -> None:
    """Rank 0 alone calls ``torch.autograd.grad`` for the input and for one parameter, between steps; nothing
    is reduced because of it, and the steps after it are right.
    """

    def train(module: Any, rank: int) -> list[Any]:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        seen: list[Any] = []
        for step in range(6):
            x = batch(step, rank).requires_grad_()
            if step == 3 and rank == 0:
                torch.autograd.grad(loss_of(module(x)), x)
                torch.autograd.grad(loss_of(module(x)), list(module.parameters())[-1])
            optimizer.zero_grad()
            loss_of(module(x)).backward()
            seen += gradients(module)
            optimizer.step()
        return seen

    compare(models.mlp, rank, train)


@scenario
def gradients_without_backward(rank: int) -> None:
    """``torch.autograd.grad`` stays on its rank: only rank 0 calls it."""
    for way in ("eager", "compiled"):
        whole = seeded(models.mlp)
        module: Any = replicate(seeded(models.mlp), bucket_cap_mb=TINY_MB, inner="aot_eager")
        run = module if way == "eager" else torch.compile(module, backend=partita_ddp)
        for step in range(3):
            loss_of(run(batch(step, rank))).backward()
        module.zero_grad()
        result = run(batch(9, rank))
        if rank == 0:
            expected = torch.autograd.grad(loss_of(whole(batch(9, rank))), list(whole.parameters()))
            actual = torch.autograd.grad(loss_of(result), list(module.parameters()))
            assert all(p.grad is None for p in module.parameters())
            assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)), way


@scenario
def batches_that_raise_on_all_ranks(rank: int) -> None:
    """Skipped, as if they had not been there; some buckets had been sent."""

    def refuse(_gradient: torch.Tensor) -> None:
        raise ValueError("not today")

    def train(module: Any, rank: int) -> list[Any]:
        seen: list[Any] = []
        for step in range(8):
            module.zero_grad()
            if step not in (0, 3, 6):
                loss_of(module(batch(step, rank))).backward()
                seen += gradients(module)
            elif not isinstance(module, DistributedDataParallel):
                handle = list(module.parameters())[3].register_hook(refuse)
                try:
                    loss_of(module(batch(step, rank))).backward()
                except ValueError:
                    handle.remove()
        return seen

    compare(models.mlp, rank, train)


@scenario
def overlaps(rank: int) -> None:
    """Buckets are sent before the backward pass is over, in the compiled graph."""
    module: Any = replicate(seeded(lambda: models.mlp(6)), bucket_cap_mb=TINY_MB, inner="aot_eager")
    ordinary(torch.compile(module, backend=partita_ddp), rank)
    times = module.replication.reducer.last
    end = times.backward_end_s - times.started_s
    assert sum(bucket.sent_s < end for bucket in times.buckets) >= len(times.buckets) - 1, (times, end)
    ready = [bucket.ready_s for bucket in times.buckets]
    assert len(ready) > 4
    assert ready == sorted(ready)


@scenario
def measured_plan(rank: int) -> None:
    """Buckets from measurements, in the middle of training: other buckets, the same gradients."""

    def train(module: Any, rank: int) -> list[Any]:
        inside = getattr(module, "_orig_mod", module)
        seen: list[Any] = []
        for step in range(12):
            if not isinstance(module, DistributedDataParallel):
                if step == 2:
                    block = inside.replication.measuring()
                    block.__enter__()
                if step == 8:
                    block.__exit__(None, None, None)
                    inside.replication.use(inside.replication.plan())
            module.zero_grad()
            loss_of(module(batch(step, rank))).backward()
            seen += gradients(module)
        if not isinstance(module, DistributedDataParallel):
            rows = inside.replication.rows()
            assert rows[0].sent_s is not None
            assert "exposed" in str(inside.replication)
        return seen

    compare(models.Mixed, rank, train)


@scenario
def plan_measured_by_itself(rank: int) -> None:
    """Likewise, with nothing to do but to ask for it."""

    def train(module: Any, rank: int) -> list[Any]:
        seen = ordinary(module, rank, steps=14)
        if not isinstance(module, DistributedDataParallel):
            reducer = getattr(module, "_orig_mod", module).replication.reducer
            assert (reducer.measuring, reducer.pass_ended, len(reducer.samples)) == (False, None, 7)
        return seen

    compare(models.Mixed, rank, train, plan="measured")
