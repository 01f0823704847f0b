"""Passes that go wrong, and buckets that change, in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import batch, loss_of, seeded
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.two_tensor import TwoTensor

from partita.ddp import partita_ddp, replicate
from partita.errors import ExecutionError
from partita.planning import BucketPlan


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        (True, "the gradient of 'weight' is dense, and the parameter is the weight of an"),
        (False, "the gradient of 'weight' is sparse, and the parameter is not the weight of an"),
    ],
)
def test_gradients_of_another_layout_than_the_embedding_says_are_refused_by_name(
    sparse: bool, message: str
) -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(lambda: nn.Embedding(5, 3, sparse=sparse)), comm)
        nn.functional.embedding(torch.tensor([1]), module.weight, sparse=not sparse).sum().backward()

    with pytest.raises(ExecutionError, match=message):
        alone(body)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_wraps_other_tensors_is_refused_by_name(compiled: bool) -> None:
    """All that it wraps came to lie in one bucket, one over the other, so all but the last were wrong."""

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(lambda: nn.Linear(3, 2)), comm, inner="aot_eager")
        run = torch.compile(module, backend=partita_ddp) if compiled else module
        for _ in range(2):
            run(TwoTensor(torch.ones(4, 3), torch.zeros(4, 3))).sum().backward()

    with pytest.raises(ExecutionError, match=r"gradient of '\w+' is a TwoTensor, which wraps other tensors"):
        alone(body)


def test_a_second_gradient_after_its_bucket_was_sent_is_an_error_unless_announced() -> None:
    def body(comm: Any, late: tuple[str, ...]) -> None:
        module: Any = replicate(seeded(models.mlp), comm, bucket_cap_mb=0.0001, inner="aot_eager", late=late)
        run = torch.compile(module, backend=partita_ddp)
        for step in range(3):
            loss_of(run(batch(step, 0))).backward()
        (loss_of(run(batch(3, 0))) + module[8].weight.square().sum()).backward()

    alone(body, ("8.weight",))
    with pytest.raises(ExecutionError, match=r"'8.weight' got another gradient after its bucket"):
        alone(body, ())


def _step_in_post_accumulate_hooks(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(_step)


def _step_in_hooks_of_nodes(module: nn.Module) -> None:
    """Hooks that run after those of the reducer."""
    for parameter in module.parameters():
        node = get_gradient_edge(parameter).node
        node.register_hook(lambda *_, parameter=parameter, _node=node: _step(parameter))


def _step(parameter: torch.Tensor) -> None:
    torch.optim.SGD([parameter], 0.1).step()
    parameter.grad = None


@pytest.mark.parametrize("register", [_step_in_post_accumulate_hooks, _step_in_hooks_of_nodes])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_in_the_backward_pass_is_refused_and_not_fed_the_gradients_of_one_rank(
    register: Callable[[nn.Module], None], compiled: bool
) -> None:
    """It took each rank's own gradients, and replicas drifted apart without a word."""

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, inner="aot_eager")
        run = torch.compile(module, backend=partita_ddp) if compiled else module
        register(module)
        loss_of(run(batch(0, 0))).backward()

    with pytest.raises(
        ExecutionError, match=r"'\d.\w+' was changed in the backward pass, before its gradient"
    ):
        alone(body)


def test_an_optimizer_in_the_backward_pass_of_one_rank_alone_is_in_order() -> None:
    def body(comm: Any) -> None:
        whole, module = seeded(models.mlp), replicate(seeded(models.mlp), comm)
        for model in (whole, module):
            _step_in_post_accumulate_hooks(model)
            with module.local():
                loss_of(model(batch(0, 0))).backward()
        for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    alone(body)


def refuse(_gradient: torch.Tensor) -> None:
    raise ValueError("not today")


def test_a_pass_that_raised_is_dropped() -> None:
    def body(comm: Any, sync: bool) -> None:
        whole, module = seeded(models.mlp), replicate(seeded(models.mlp), comm, bucket_cap_mb=0.001)
        handle = module[4].weight.register_hook(refuse)
        with nullcontext() if sync else module.no_sync(), pytest.raises(ValueError, match="not today"):
            loss_of(module(batch(0, 0))).backward()
        handle.remove()
        module.zero_grad()
        for model in (whole, module):
            loss_of(model(batch(1, 0))).backward()
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(whole.parameters(), module.parameters(), strict=True)
        )

    alone(body, True)
    alone(body, False)


def test_a_reentrant_checkpoint_that_leaves_a_parameter_out_is_an_error_at_the_next_forward_pass() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(lambda: models.Checkpointed(reentrant=True)), comm)
        module.blocks[1].register_forward_hook(lambda *_: torch.zeros(6, models.WIDTH, requires_grad=True))
        loss_of(module(batch(1, 0).requires_grad_())).backward()
        module(batch(1, 0))

    with pytest.raises(
        ExecutionError, match=r"did not come to its end \(\d parameters, 'blocks.1.0.weight' among"
    ):
        alone(body)


def test_buckets_do_not_change_within_a_pass() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm)
        names = tuple(module.replication.reducer.names)
        plan = BucketPlan((names,), (1,), (0.0,), (0.0,), 0.0)
        changed = []

        def change(_gradient: torch.Tensor) -> None:
            with pytest.raises(ExecutionError, match="the buckets can't change while a backward pass runs"):
                module.replication.use(plan)
            changed.append(True)

        module[0].weight.register_hook(change)
        loss_of(module(batch(0, 0))).backward()
        assert changed

    alone(body)


def test_the_same_buckets_by_another_plan_are_no_change() -> None:
    def body(comm: Any) -> None:
        reducer = replicate(seeded(models.mlp), comm).replication.reducer
        before = reducer.version
        reducer.use_plan(BucketPlan((reducer.names,), (1,), (0.0,), (0.0,), 0.0))
        assert reducer.version == before
        reducer.use_plan(
            BucketPlan((reducer.names[:1], reducer.names[1:]), (1, 1), (0.0,) * 2, (0.0,) * 2, 0.0)
        )
        assert reducer.version == before + 1
        assert [reducer.bucket_of[0], reducer.bucket_of[1]] == [0, 1]

    alone(body)


def test_detached_the_reducer_sees_nothing() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(nn.Linear(2, 2), comm)
        module.replication.reducer.detach()
        module(torch.ones(1, 2)).sum().backward()
        assert module.replication.last_pass is None

    alone(body)
