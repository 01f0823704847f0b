"""``replicate``: data parallel training of a module, in eager mode and compiled."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from partita._torch.distributed.gradient_sync import replicated_in_place
from partita._torch.modules.compiled import inside_compiled
from partita.ddp.buckets.comm_hooks import CommHook, check_comm_hook
from partita.ddp.buckets.settings import MIB, ReducerSettings
from partita.ddp.replicas.replicated import Replicated, replicated_class, turn_into
from partita.ddp.replicas.replication import Replication
from partita.errors import ArgumentError
from partita.planning import BucketPlan
from partita.runtime import NULL_TRACER, Comm, ProcessGroupComm, Recorder
from partita.runtime.comms.shared_memory import leave_shared_memory
from partita.runtime.failures.thread_activity import doing
from partita.runtime.graph_compiler import InnerCompiler
from partita.runtime.publish_errors import closed_on_error

__all__ = ["replicate"]

_LOG = logging.getLogger("partita.ddp")
_DEFAULT_CAP_MB = 25.0
_FIRST_BUCKET_BYTES = MIB


def replicate(
    module: nn.Module,
    process_group: dist.ProcessGroup | Comm | None = None,
    *,
    bucket_cap_mb: float = _DEFAULT_CAP_MB,
    plan: BucketPlan | Literal["measured"] | None = None,
    comm_hook: CommHook | None = None,
    inner: InnerCompiler = "inductor",
    broadcast_buffers: bool = True,
    initial: Literal["broadcast", "check"] = "broadcast",
    ignored: Collection[str] = (),
    late: Collection[str] = (),
    check_graphs: bool = False,
    tracer: Recorder = NULL_TRACER,
) -> Replicated:
    """Train equal replicas of ``module``, one a rank: gradients are averaged over all ranks, in buckets,
    while the backward pass runs. Collective.

    The module stays the object that it is, with its names of parameters and buffers, so checkpoints and
    optimizers see no difference. Compile it afterwards, ``torch.compile(module, backend="partita_ddp")``;
    without that, the same buckets run from hooks on the gradients. Parameters that get no gradient, in some
    steps or on some ranks, need no option.

    Args:
        process_group: of ``torch.distributed`` (None: the default group), or a `partita.runtime.Comm`.
        bucket_cap_mb: a bucket is closed as soon as it holds so many MiB. With the default, the first one is
            closed at 1 MiB, so that communication starts early.
        plan: which parameters share a bucket, from `partita.planning.plan_buckets`; the cap is not used then.
            ``"measured"``: starts with the cap, measures a few of the first steps and the links, and changes
            to the buckets whose reduction ends first; compiled graphs are cut anew twice.
        comm_hook: how a bucket is averaged, see `CommHook`.
        inner: compiles the graphs: ``"inductor"``, ``"aot_eager"`` (runs them as they are), a
            `partita.runtime.PieceRunner` (such as `partita.cudagraphs.CudaGraphsRunner`), or a function of a
            graph and example inputs.
        broadcast_buffers: take the buffers of rank 0 over, before each forward pass in training mode that
            follows a synchronised one. Evaluation (``eval()``, or no gradients) sends nothing: it uses those
            that rank 0 had at the end of the last synchronised backward pass.
        initial: take parameters and buffers of rank 0 over, or check that they are equal on all ranks.
        ignored: names of parameters and buffers that stay on their rank.
        late: names of parameters that compiled graphs use and other code too; their gradients are sent when
            autograd has added up all of them.
        check_graphs: raise where ranks compile different backward graphs for inputs of the same sizes.
            Without it the log warns of that, and gradients are right.
        tracer: is given a span for each bucket and each wait.

    Returns:
        ``module``.

    Raises:
        ArgumentError: an argument that can't be used, a module that is replicated or compiled already.
        PlanError: a plan for other parameters.
        SignatureMismatch: ranks replicate different models, or with different options; on every rank.
        PeerFailed: another rank could not replicate.
        ExecutionError: the ranks can't be connected.
    """
    with doing("replicate()"):
        comm = (
            process_group if isinstance(process_group, Comm) else ProcessGroupComm.from_group(process_group)
        )
    with nullcontext() if comm is process_group else closed_on_error(comm, "replicate()"):
        _check_arguments(module, bucket_cap_mb, plan, initial, {"ignored": ignored, "late": late})
        check_comm_hook(comm_hook)
        leave_shared_memory([*module.parameters(), *module.buffers()])
        replica_class = replicated_class(type(module))
        cap = max(1, int(bucket_cap_mb * MIB))
        replication = Replication(
            module,
            comm,
            ReducerSettings(
                cap,
                min(cap, _FIRST_BUCKET_BYTES) if bucket_cap_mb == _DEFAULT_CAP_MB else cap,
                plan if isinstance(plan, BucketPlan) else None,
                comm_hook,
                check_graphs,
                frozenset(late),
                tune=plan == "measured",
            ),
            inner=inner,
            ignored=frozenset(ignored),
            broadcast_buffers=broadcast_buffers,
            initial=initial,
            tracer=tracer,
        )
        if isinstance(comm, ProcessGroupComm) and comm is not process_group:
            comm.used_by(replication)
    name = type(module).__name__
    turn_into(replica_class, module, replication)
    _LOG.info("buckets of %s:\n%s", name, replication)
    return cast(Replicated, module)


def _check_arguments(
    module: nn.Module,
    bucket_cap_mb: float,
    plan: object,
    initial: str,
    names: Mapping[str, Collection[str]],
) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"module is a torch.nn.Module, got {type(module).__name__}: replicate() the module that holds "
            "the parameters"
        )
    if inside_compiled(module) is not None:
        raise ArgumentError(
            "the module is compiled already: replicate it first and compile it then, "
            'torch.compile(replicate(module), backend="partita_ddp")'
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            "the module is a TorchScript one, whose class can't be another: replicate the nn.Module that it "
            "was made from, and compile that with torch.compile"
        )
    if isinstance(module, Replicated):
        raise ArgumentError(
            "the module is replicated already: call replicate() once, on the plain module, or "
            "replication.close() first"
        )
    if isinstance(module, DistributedDataParallel) or replicated_in_place([module]):
        raise ArgumentError(
            f"the module is a {type(module).__name__}, which averages gradients by itself: replicate() the "
            "module inside of it"
        )
    if not (isinstance(bucket_cap_mb, (int, float)) and bucket_cap_mb > 0):
        raise ArgumentError(f"bucket_cap_mb is {bucket_cap_mb!r}: give a size above 0, in MiB")
    for argument, value in names.items():
        if isinstance(value, str):
            raise ArgumentError(f"{argument} is the text {value!r}: give a list of names, [{value!r}]")
    if not (plan is None or plan == "measured" or isinstance(plan, BucketPlan)):
        raise ArgumentError(f"plan is a BucketPlan, 'measured' or None, got {plan!r}")
    if initial not in ("broadcast", "check"):
        raise ArgumentError(f"initial is 'broadcast' or 'check', got {initial!r}")
