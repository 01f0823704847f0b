"""What a replicated module is to its user."""

from __future__ import annotations

import copy
import io
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import batch, loss_of, seeded
from tests.group_of_one import group_of_one
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from partita.ddp import partita_ddp, replicate
from partita.errors import ArgumentError, ExecutionError, PlanError, ReplicasDiffer, SignatureMismatch
from partita.planning import BucketPlan
from partita.runtime import InProcessWorld, Tracer


def test_a_parameter_that_is_trained_later_is_an_error() -> None:
    def body(comm: Any) -> None:
        original = seeded(models.mlp)
        original[0].weight.requires_grad_(False)
        module: Any = replicate(original, comm)
        module[0].weight.requires_grad_(True)
        module(batch(0, 0))

    with pytest.raises(ExecutionError, match=r"'0.weight' was frozen when the module was replicated"):
        alone(body)


def _forgets_to_return(_: Any, __: Any) -> Any: ...


def test_a_compiler_that_returns_nothing_is_named() -> None:
    """The first step ended in "'NoneType' object is not callable"."""

    def body(comm: Any) -> None:
        module: Any = replicate(nn.Linear(2, 2), comm, inner=_forgets_to_return)
        torch.compile(module, backend=partita_ddp)(torch.ones(1, 2))

    with pytest.raises(
        Exception, match="_forgets_to_return compiles graphs and returned None for one: return a"
    ):
        alone(body)


class _Registered(nn.Linear):
    """Of a class that has no subclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("registered twice")


def test_a_module_that_can_not_be_replicated_stays_as_it_was() -> None:
    """Its class, its hooks, and its parameters, which would be those of rank 0."""
    another = BucketPlan((("nope",),), (8,), (0.0,), (0.0,), 0.0)

    raised: list[BaseException] = []

    def body(comm: Any) -> None:
        torch.manual_seed(comm.rank)
        for module, options, error in (
            (_Registered(2, 2), {}, TypeError),
            (nn.Linear(2, 2), {"plan": another}, PlanError),
            (nn.Linear(2, 2), {"initial": "check"}, SignatureMismatch),
        ):
            before = {name: value.clone() for name, value in module.state_dict().items()}
            kind = type(module)
            with pytest.raises(error) as caught:
                replicate(module, comm, **options)
            raised.append(caught.value)  # its traceback keeps whatever was made before
            assert type(module) is kind
            assert not module._forward_pre_hooks
            assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
            for name, value in module.state_dict().items():
                assert torch.equal(value, before[name])
            module(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
            assert module.weight.grad.unique().tolist() == [comm.rank + 1.0]

    InProcessWorld(2).run(body)


@pytest.mark.parametrize(
    ("loaded_on", "again", "refused"),
    [((0,), False, True), ((1,), False, True), ((0, 1), False, False), ((0,), True, False)],
    ids=["on rank 0", "on rank 1", "on both", "and put back"],
)
def test_weights_that_one_rank_alone_has_loaded_are_refused(
    loaded_on: tuple[int, ...], again: bool, refused: bool
) -> None:
    """Gradients were averaged, and each rank trained a model of its own, without a word."""

    def body(comm: Any) -> str:
        module = replicate(nn.Linear(2, 2), comm)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        if comm.rank in loaded_on:
            module.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        if again and comm.rank in loaded_on:
            module.load_state_dict(before)
        try:
            for _ in range(2):
                module(torch.ones(1, 2)).sum().backward()
                torch.optim.SGD(module.parameters(), 0.1).step()
        except SignatureMismatch as error:
            return str(error)
        return ""

    for text in InProcessWorld(2).run(body):
        assert (
            "'weight' of rank 1 has other values than that of rank 0 (4 of its 4 numbers differ" in text
        ) == refused, text


def _a_learning_rate_of_its_own(module: Any, rank: int, step: int) -> None:
    torch.optim.SGD(module.parameters(), 0.1 + 1e-7 * rank).step()


def _loaded_on_rank_1(module: Any, rank: int, step: int) -> None:
    if rank and step == 2:
        module.load_state_dict({name: value + 1.0 for name, value in module.state_dict().items()})


def _clipped_on_rank_0(module: Any, rank: int, step: int) -> None:
    if not rank and step == 2:
        with torch.no_grad():
            module[0].bias.clamp_(max=-1.0)


def _alike(module: Any, rank: int, step: int) -> None:
    torch.optim.AdamW(module.parameters(), 0.1).step()


def _averaged_for_a_look(module: Any, rank: int, step: int) -> None:
    """Rank 0 evaluates with other weights, and puts those that it trains back."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    if not rank:
        module.load_state_dict({name: value + 1.0 for name, value in before.items()})
        module.load_state_dict(before)


def _not_a_number(module: Any, rank: int, step: int) -> None:
    with torch.no_grad():
        module[0].weight.fill_(float("nan"))


@pytest.mark.parametrize(
    ("what_a_rank_does", "warned_of"),
    [
        (_a_learning_rate_of_its_own, "of rank 1 has other values"),
        (_loaded_on_rank_1, "'0.weight' of rank 1 has other values"),
        (_clipped_on_rank_0, r"'0.bias' of rank 1 has other values.*\(4 of its 4 numbers differ\) after"),
        (_alike, ""),
        (_averaged_for_a_look, ""),
        (_not_a_number, ""),
    ],
)
def test_replicas_that_drift_apart_are_named(
    what_a_rank_does: Callable[[Any, int, int], None], warned_of: str
) -> None:
    def body(comm: Any) -> list[str]:
        torch.manual_seed(0)
        module: Any = replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), comm)
        texts = []
        for step in range(12):
            try:
                module(torch.randn(8, 4)).square().sum().backward()
            except ReplicasDiffer as warning:  # warnings are errors here
                texts.append(str(warning))
            what_a_rank_does(module, comm.rank, step)
        return texts

    for texts in InProcessWorld(2).run(body):
        assert len(texts) == bool(warned_of), texts
        for text in texts:
            assert re.search(warned_of, text), text


class _Adapted(nn.Module):
    """A weight that is made of two tensors, as quantised ones are, and a bias that is trained."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        values = torch.full((3,), 1.0 + rank, dtype=torch.float64)
        self.weight = nn.Parameter(TwoTensor(torch.ones(3).double(), values), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3))


def test_frozen_weights_that_wrap_others_are_those_of_rank_0() -> None:
    """Quantised ones, below adapters that are trained: an error of their class about `view` came out."""

    def body(comm: Any) -> list[float]:
        with pytest.raises(
            SignatureMismatch, match=r"'weight' of rank 1 has other values .* \(3 of its 3 numb"
        ):
            replicate(_Adapted(comm.rank), comm, initial="check")
        module: Any = replicate(_Adapted(comm.rank), comm)
        return module.weight.b.tolist()

    assert InProcessWorld(2).run(body) == [[1.0] * 3] * 2


def test_copies_and_pickles_are_plain_modules() -> None:
    def body(comm: Any) -> None:
        original = seeded(models.WithUnused)
        names = list(original.state_dict())
        module: Any = replicate(original, comm)
        assert module is original
        assert isinstance(module, models.WithUnused)
        assert list(module.state_dict()) == names
        copied = copy.deepcopy(module)
        assert type(copied) is models.WithUnused
        loss_of(copied(batch(0, 0))).backward()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)) is models.WithUnused
        assert "bucket" in str(module.replication)

    alone(body)


def test_buckets_are_in_the_log_and_in_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(0)

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, bucket_cap_mb=0.001, tracer=tracer)
        loss_of(module(batch(0, 0))).backward()

    with caplog.at_level(logging.INFO, "partita.ddp"):
        alone(body)
    assert "exposed  parameters" in caplog.text
    assert "8.bias" in caplog.text
    reduced = [event for event in tracer.events if event.category == "reduce"]
    assert [event.name for event in reduced][:2] == ["bucket 0", "bucket 1"]
    assert reduced[0].args["bytes"] >= 1048


def test_after_close_the_module_trains_alone() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm)
        module.replication.close()
        assert type(module) is nn.Sequential
        loss_of(module(batch(0, 0))).backward()
        assert module[0].weight.grad is not None

    alone(body)


def test_the_attribute_of_torchs_ddp_keeps_gradients_on_their_rank() -> None:
    """A loop that set it in place of ``no_sync`` was reduced each time, without a word."""
    seen: dict[int, list[bool]] = {}

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm)
        own = seeded(models.mlp)
        seen[comm.rank] = []
        for sync in (False, True):
            module.require_backward_grad_sync = sync
            loss_of(module(batch(0, comm.rank))).backward()
            loss_of(own(batch(0, comm.rank))).backward()
            seen[comm.rank].append(torch.equal(module[0].weight.grad, own[0].weight.grad))
        assert module.require_backward_grad_sync

    InProcessWorld(2).run(body)
    assert seen == {0: [True, False], 1: [True, False]}


def test_gradients_of_a_compiled_run_from_before_the_end_stay_on_their_rank() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, inner="aot_eager")
        run = torch.compile(module, backend=partita_ddp)
        loss_of(run(batch(0, 0))).backward()
        module.zero_grad()
        loss = loss_of(run(batch(1, 0)))
        module.replication.close()
        loss.backward()
        original = seeded(models.mlp)
        loss_of(original(batch(1, 0))).backward()
        for ours, theirs in zip(module.parameters(), original.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)

    alone(body)


def test_another_module_of_the_same_class_is_not_replicated() -> None:
    def body(comm: Any) -> None:
        module = replicate(nn.Linear(2, 2), comm)
        other = type(module)(2, 2)
        with pytest.raises(ExecutionError, match="a copy of a replicated module, and not replicated itself"):
            other.no_sync().__enter__()

    alone(body)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            torch.relu,
            {},
            r"module is a torch.nn.Module, got builtin_function_or_method: replicate\(\) the module",
        ),
        (
            nn.Linear(2, 2),
            {"comm_hook": default_hooks.fp16_compress_hook},
            "comm_hook is torch's fp16_compress_hook, which takes a state and a GradBucket",
        ),
        (
            nn.Linear(2, 2),
            {"comm_hook": "fp16"},
            "comm_hook is a function of a flat bucket and a comm, got 'fp16'",
        ),
        (nn.Linear(2, 2), {"bucket_cap_mb": "25"}, "bucket_cap_mb is '25': give a size above 0, in MiB"),
        (nn.Linear(2, 2), {"ignored": "weight"}, r"ignored is the text 'weight': give a list of names, \['w"),
        (nn.Linear(2, 2), {"late": ["wieght"]}, "late names 'wieght', which the module does not have"),
    ],
)
def test_what_replicate_can_not_use_is_refused_at_once(
    module: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        alone(lambda comm: replicate(module, comm, **options))


def test_a_module_that_torch_replicates_is_refused() -> None:
    with group_of_one():
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(
            ArgumentError, match=r"a DistributedDataParallel, which averages .*the module inside"
        ):
            replicate(wrapped)
        del wrapped


@pytest.mark.parametrize("group", ["gloo", "mesh"])
def test_what_is_no_process_group_is_refused(group: Any) -> None:
    with group_of_one():
        other: Any = init_device_mesh("cpu", (1,)) if group == "mesh" else group
        with pytest.raises(ArgumentError, match=r"process_group is of type .*needed here"):
            replicate(nn.Linear(2, 2), other)


def test_a_comm_hook_that_returns_no_handle_is_named() -> None:
    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, comm_hook=_returns_nothing)
        loss_of(module(batch(0, 0))).backward()

    with pytest.raises(
        ExecutionError, match="comm_hook _returns_nothing returned NoneType, which has no wait"
    ):
        alone(body)


def _returns_nothing(_flat: torch.Tensor, _comm: Any) -> Any:
    return None


def test_a_replicated_module_is_refused_with_how_to_replicate_it_anew() -> None:
    def body(comm: Any) -> None:
        replicate(replicate(seeded(models.mlp), comm), comm)

    with pytest.raises(ArgumentError, match=r"replicated already: .* or replication.close\(\) first"):
        alone(body)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_alone_in_evaluation_reduces_no_pass_of_no_sync(when: str) -> None:
    """It reduced the pass that came next, and waited for ranks that did not."""

    def body(comm: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        module: Any = replicate(nn.Linear(2, 1), comm)

        def alone() -> None:
            if comm.rank == 0:
                module.eval()
                module(torch.ones(1, 2))  # gradients are not switched off
                module.train()

        if when == "before":
            alone()
        with module.no_sync():
            out = module(torch.full((1, 2), 1.0 + comm.rank))
        if when == "between":
            alone()
        out.sum().backward()
        own = module.weight.grad.clone()
        module(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
        return own, module.weight.grad.clone()

    (own_0, mean_0), (own_1, mean_1) = InProcessWorld(2).run(body)
    assert [own_0.tolist(), own_1.tolist()] == [[[1.0, 1.0]], [[2.0, 2.0]]]
    assert mean_0.tolist() == mean_1.tolist() == [[3.0, 3.0]]
