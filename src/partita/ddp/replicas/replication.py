"""``Replication``: what keeps the replicas of a module equal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn

from partita._torch.autograd.running_pass import current_pass
from partita._torch.tensors.subclasses import innermost_tensors
from partita._torch.tensors.tensor_text import short_name, tensor_text
from partita._torch.tensors.versions import times_written
from partita.ddp.buckets.bucket_report import BucketRow, PassTimes, bucket_rows, bucket_table
from partita.ddp.buckets.settings import ReducerSettings, describe_plan
from partita.ddp.reducing.agreement import check_same_replicas
from partita.ddp.reducing.pass_errors import failed_everywhere
from partita.ddp.reducing.reducer import Reducer
from partita.ddp.reducing.tuning import MARGIN, measure_links_of, plan_from_samples, tune_itself
from partita.ddp.replicas.broadcast import StateBroadcast, check_equal, difference_from_rank_0
from partita.ddp.replicas.module_watch import ModuleWatch
from partita.ddp.replicas.orphans import refuse_orphans
from partita.ddp.replicas.owners import Owners
from partita.ddp.replicas.replicable import check_replicable, sparse_weights
from partita.errors import ExecutionError, ReplicasDiffer
from partita.planning import BucketPlan, Cluster
from partita.runtime import Comm, Recorder
from partita.runtime.failures.thread_activity import doing
from partita.runtime.graph_compiler import InnerCompiler, check_inner
from partita.runtime.same_settings import check_same

__all__ = ["REPLICATIONS", "Replication"]

_LOG = logging.getLogger("partita.ddp")


class Replication:
    """Keeps the replicas of a module equal. Made by `replicate`.

    Attributes:
        sync: whether the gradients of the next forward pass will be reduced.
        inner: the compiler of its graphs.
        reducer: what reduces its gradients.
        closed: replication has ended.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        settings: ReducerSettings,
        *,
        inner: InnerCompiler,
        ignored: Collection[str],
        broadcast_buffers: bool,
        initial: Literal["broadcast", "check"],
        tracer: Recorder,
    ) -> None:
        self.comm = comm
        self.inner = check_inner(inner)
        self.sync = True
        self.closed = False

        # 1. What of the module is replicated: parameters that are trained, and the state that is equal.
        named = dict(module.named_parameters())
        trained = {
            name: value for name, value in named.items() if value.requires_grad and name not in ignored
        }
        owners = {name: REPLICATIONS.owner_of(value) for name, value in trained.items()}
        taken = {name: owner[0].module for name, owner in owners.items() if owner is not None}
        sparse = sparse_weights(module, trained)
        listed = {"ignored": ignored, "late": settings.late}
        check_replicable(module, named, trained, listed, taken, sparse)
        state = {
            name: value for name, value in (*named.items(), *module.named_buffers()) if name not in ignored
        }

        # 2. The same on every rank?
        options = {"broadcast_buffers": str(broadcast_buffers), "initial": repr(initial)}
        check_same_replicas(
            comm,
            settings.common() | options,
            [_fact(*item, is_sparse=item[0] in sparse) for item in state.items()],
        )

        # 3. What works for it: before each forward pass, in backward, at the end.
        self._undo: Callable[[], None] = _nothing
        self._watch = ModuleWatch(module, trained, ignored, with_buffers=broadcast_buffers)
        self._module = ref(module)
        self._buffers = self._broadcast_of_buffers()
        self._last_synced = True
        self.reducer = Reducer(list(trained), list(trained.values()), comm, settings, tracer, sparse=sparse)
        self.reducer.beside = self._send_buffers
        if settings.tune:
            self.reducer.pass_ended = tune_itself

        # 4. Parameters and buffers as on rank 0.
        try:
            if initial == "broadcast":
                StateBroadcast(comm, list(state.values())).run()
            else:
                check_equal(comm, state)
        except BaseException:
            self.reducer.detach()
            raise
        self._written_at_first = self._times_written()
        self.reducer.compare_weights(self._times_written_since, self._check_weights, self._warn_of_drift)
        for index, parameter in enumerate(trained.values()):
            REPLICATIONS.claim(parameter, self, index)
        refuse_orphans(module, trained, REPLICATIONS)
        REPLICATIONS.note_use(self)

    def _times_written(self) -> int:
        return sum(map(times_written, self.reducer.parameters))

    def _times_written_since(self) -> int:
        return self._times_written() - self._written_at_first

    def _check_weights(self) -> None:
        """Weights that one rank alone has loaded would stay its own for good: gradients are equal."""
        check_equal(self.comm, self._trained)

    def _warn_of_drift(self, passes: int) -> bool:
        difference = difference_from_rank_0(self.comm, self._trained)
        if difference is None:
            return False
        warnings.warn(
            f"parameter {difference} after {passes} synchronised backward passes, and each rank "
            "trains a model of its own. Their gradients are equal, so look for what ranks do differently "
            "with them or with the weights: a learning rate that follows the loss of its own rank, weights "
            "that one rank alone has loaded, an optimizer that rounds at random. To go on from the weights "
            "of rank 0: replication.close(), and replicate() again",
            ReplicasDiffer,
            stacklevel=1,
        )
        return True

    @property
    def _trained(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.reducer.names, self.reducer.parameters, strict=True))

    def on_close(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when replication ends."""
        self._undo = undo

    def _broadcast_of_buffers(self) -> StateBroadcast | None:
        buffers = list(self._watch.buffers.values())
        return StateBroadcast(self.comm, buffers, unseen=True) if buffers else None

    def before_forward(self, module: nn.Module) -> None:
        """Prepare a forward pass: take the buffers of rank 0 over.

        In evaluation nothing is sent, for a rank may be alone in it: the buffers are those that rank 0 had at
        the end of the last synchronised backward pass.

        Raises:
            ExecutionError: the module holds what was not there when it was replicated; on every rank, unless
                in evaluation.
        """
        if current_pass() >= 0:
            return  # a checkpoint computes its activations again
        REPLICATIONS.note_use(self)
        if self.reducer.paused:
            return
        if module.training and torch.is_grad_enabled():
            fault = self._refresh(module)
            if fault is not None:
                raise failed_everywhere(self.comm, fault, "the forward pass")
            self.reducer.finish_last_pass()
            if self._buffers is not None:
                self._buffers.forget()
                if self._last_synced:
                    with doing("the forward pass of a replicated module"):
                        self._buffers.run()
            self._last_synced = self.sync
        else:
            fault = self._refresh(module)
            if fault is not None and torch.is_grad_enabled():
                raise ExecutionError(fault)
            if self._buffers is not None:
                self._buffers.overwrite()
        if torch.is_grad_enabled():
            self.reducer.next_pass.forward_begins(sync=self.sync, trains=module.training)

    def expect_backward(self) -> None:
        """Reduce the next backward pass, whatever the forward passes before it said."""
        self._last_synced = True
        self.reducer.next_pass.forward_begins(sync=True, trains=True)

    def _refresh(self, module: nn.Module) -> str | None:
        """Look up what the module holds now. Returns why it can't be trained so; None where it can."""
        if self._watch.look(module):
            self._buffers = self._broadcast_of_buffers()
        fault = self._watch.fault()
        return None if fault is None else f"{fault}: call replication.close() and replicate() again"

    def _send_buffers(self) -> Callable[[], None]:
        """At the end of a synchronised backward pass, start to send the buffers of rank 0 beside the
        gradients, for an evaluation that may follow. What is returned waits for them.
        """
        module = self.module
        fault = None if module is None else self._refresh(module)
        if fault is not None:
            raise failed_everywhere(self.comm, fault, "backward")
        return _nothing if self._buffers is None else self._buffers.start()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure when each gradient is ready in the synchronised backward passes of this block.

        Compiled graphs are cut after each gradient meanwhile, and compiled anew before and after, so let the
        block hold at least four steps, of which the first two do not count. The same on every rank. Ends what
        ``plan="measured"`` began.
        """
        self.reducer.pass_ended = None
        self.reducer.measure(on=True)
        try:
            yield
        finally:
            self.reducer.measure(on=False)

    def plan(self, cluster: Cluster | None = None, *, margin: float = MARGIN) -> BucketPlan:
        """Return the buckets whose reduction ends first, for the backward times that `measuring` has seen.

        Collective.

        Args:
            cluster: the links between the ranks; None measures them, see `measure_links`, between the
                devices of the gradients.
            margin: by which part an all-reduce may take longer or shorter, beside a backward pass, than the
                links say; see `partita.planning.plan_buckets`.

        Raises:
            PlanError: nothing has been measured, or a negative margin.
        """
        links = cluster if cluster is not None else measure_links_of(self.reducer)
        return plan_from_samples(self.reducer, links, margin=margin)

    def use(self, plan: BucketPlan) -> None:
        """Reduce gradients in the buckets of ``plan`` from now on. Collective.

        Compiled graphs are cut anew at their next run. The same plan on every rank. Ends what
        ``plan="measured"`` began.

        Raises:
            SignatureMismatch: ranks use different plans; on every rank.
            PlanError: a plan for other parameters.
        """
        check_same(self.comm, {"the plan of the buckets": describe_plan(plan)})
        self.reducer.pass_ended = None
        self.reducer.use_plan(plan)
        _LOG.info("planned buckets:\n%s", self)

    @property
    def module(self) -> nn.Module | None:
        """The replicated module; None where nobody has it any more."""
        return self._module()

    @property
    def last_pass(self) -> PassTimes | None:
        """When the buckets of the last synchronised backward pass were ready, sent and reduced."""
        return self.reducer.last

    def rows(self) -> tuple[BucketRow, ...]:
        """Return the buckets, with the times of the last synchronised backward pass."""
        return bucket_rows(self.reducer.buckets, self.reducer.last)

    def __str__(self) -> str:
        return bucket_table(self.rows())

    def close(self) -> None:
        """End replication: the module is a plain one again; gradients stay on their rank. Collective."""
        self.closed = True
        self._undo()
        self.reducer.detach()
        for parameter in self.reducer.parameters:
            REPLICATIONS.release(parameter)
        self.comm.close()


REPLICATIONS: Owners[Replication] = Owners()
"""The replications of this process."""


def _nothing() -> None:
    """There is nothing to do."""


def _fact(name: str, value: torch.Tensor, *, is_sparse: bool) -> tuple[Any, ...]:
    wrapped = [tensor_text(part) for part in innermost_tensors(value) if part is not value]
    if is_sparse:
        wrapped.append("sparse gradients")
    return name, short_name(value.dtype), tuple(value.shape), value.requires_grad, *wrapped
