"""``replicate``: data parallel training of a module, in eager mode and compiled."""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from partita._torch.autograd.running_pass import current_pass
from partita._torch.modules.compiled import inside_compiled
from partita.ddp.inner import InnerCompiler, check_inner
from partita.ddp.reducing.agreement import check_same_replicas
from partita.ddp.reducing.bucket_report import BucketRow, PassTimes, bucket_rows, bucket_table
from partita.ddp.reducing.comm_hooks import CommHook
from partita.ddp.reducing.pass_errors import failed_everywhere
from partita.ddp.reducing.reducer import Reducer
from partita.ddp.reducing.settings import MIB, ReducerSettings, describe_plan
from partita.ddp.reducing.tuning import MARGIN, measure_links_of, plan_from_samples, tune_itself
from partita.ddp.replicas.broadcast import StateBroadcast
from partita.ddp.replicas.module_watch import ModuleWatch
from partita.ddp.replicas.owners import Owners
from partita.ddp.replicas.replicable import check_replicable
from partita.errors import ArgumentError, ExecutionError
from partita.planning import BucketPlan, Cluster
from partita.runtime import NULL_TRACER, Comm, ProcessGroupComm, Recorder
from partita.runtime.publish_errors import closed_on_error
from partita.runtime.same_settings import check_same
from partita.runtime.shared_memory import leave_shared_memory
from partita.runtime.whereabouts import doing

__all__ = ["REPLICATIONS", "Replicated", "Replication", "replicate"]

_LOG = logging.getLogger("partita.ddp")
_DEFAULT_CAP_MB = 25.0
_FIRST_BUCKET_BYTES = MIB


class Replicated(nn.Module):
    """What `replicate` turns a module into: the same object, whose class is also this one."""

    @property
    def replication(self) -> Replication:
        """What reduces its gradients."""
        found = vars(self).get("_partita_replication")
        if found is None:
            raise ExecutionError(
                "this is a copy of a replicated module, and not replicated itself: call replicate()"
            )
        return cast("Replication", found)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forward passes in this block stay on their rank, and add up there until a later pass
        is reduced.
        """
        replication = self.replication
        before, replication.sync = replication.sync, False
        try:
            yield
        finally:
            replication.sync = before

    @contextmanager
    def local(self) -> Iterator[None]:
        """In this block the module is this rank's own, as ``.module`` of torch's DDP is: nothing is sent or
        reduced, in training mode too, and other ranks need not take part. Gradients of backward passes in it
        stay on this rank: call ``zero_grad()`` before the next step.
        """
        replication = self.replication
        before, replication.reducer.paused = replication.reducer.paused, True
        try:
            yield
        finally:
            replication.reducer.paused = before

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the class that the module had before."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        plain = type(self).__mro__[2]
        _, args, state, *rest = reduced
        state = {key: value for key, value in state.items() if key != "_partita_replication"}
        return (_created, (plain, *args[1:]), _without_hook(state), *rest)


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
        self._undo: Callable[[], None] = _nothing
        named = dict(module.named_parameters())
        trained = {
            name: value for name, value in named.items() if value.requires_grad and name not in ignored
        }
        taken = {name for name, value in trained.items() if REPLICATIONS.owner_of(value) is not None}
        check_replicable(module, named, trained, ignored, taken)
        self._watch = ModuleWatch(module, trained, ignored, with_buffers=broadcast_buffers)
        self._module = ref(module)
        self._buffers = self._broadcast_of_buffers()
        self._last_synced = True
        buffers = {name: value for name, value in module.named_buffers() if name not in ignored}
        state = {name: value for name, value in named.items() if name not in ignored} | buffers
        options = {"broadcast_buffers": str(broadcast_buffers), "initial": repr(initial)}
        check_same_replicas(comm, settings.common() | options, [_fact(*item) for item in state.items()])
        self.reducer = Reducer(list(trained), list(trained.values()), comm, settings, tracer)
        of_rank_0 = StateBroadcast(comm, list(state.values()))
        try:
            if initial == "broadcast":
                of_rank_0.run()
            else:
                of_rank_0.check(list(state))
        except BaseException:
            self.reducer.detach()
            raise
        self.reducer.beside = self._keep_buffers
        if settings.tune:
            self.reducer.pass_ended = tune_itself
        for index, parameter in enumerate(trained.values()):
            REPLICATIONS.claim(parameter, self, index)
        REPLICATIONS.note_use(self)

    def on_close(self, undo: Callable[[], None]) -> None:
        """What has to be undone at the end."""
        self._undo = undo

    def _broadcast_of_buffers(self) -> StateBroadcast | None:
        buffers = list(self._watch.buffers.values())
        return StateBroadcast(self.comm, buffers, unseen=True) if buffers else None

    def before_forward(self, module: nn.Module) -> None:
        """What has to happen before each forward pass: buffers as on rank 0.

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
            fault = self._look(module)
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
            fault = self._look(module)
            if fault is not None and torch.is_grad_enabled():
                raise ExecutionError(fault)
            if self._buffers is not None:
                self._buffers.take_over()
        if torch.is_grad_enabled():
            self.reducer.forward_begins(sync=self.sync)

    def _look(self, module: nn.Module) -> str | None:
        """Take in what the module holds now. Why it can't be trained so, in words."""
        if self._watch.look(module):
            self._buffers = self._broadcast_of_buffers()
        fault = self._watch.fault()
        return None if fault is None else f"{fault}: call replication.close() and replicate() again"

    def _keep_buffers(self) -> Callable[[], None]:
        """A synchronised backward pass ends: the buffers of rank 0 travel beside its gradients, for an
        evaluation that may follow. To be called when the gradients are there.
        """
        module = self._module()
        fault = None if module is None else self._look(module)
        if fault is not None:
            raise failed_everywhere(self.comm, fault, "backward")
        return _nothing if self._buffers is None else self._buffers.start_keeping()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Note when each gradient is ready in the synchronised backward passes of this block.

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
        """The buckets whose reduction ends first, for the backward times that `measuring` has seen.
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
        """Reduce gradients in the buckets of ``plan`` from now on; compiled graphs are cut anew at their next
        run. The same plan on every rank. Ends what ``plan="measured"`` began. Collective.

        Raises:
            SignatureMismatch: ranks use different plans; on every rank.
            PlanError: a plan for other parameters.
        """
        check_same(self.comm, {"the plan of the buckets": describe_plan(plan)})
        self.reducer.pass_ended = None
        self.reducer.use_plan(plan)
        _LOG.info("planned buckets:\n%s", self)

    @property
    def last_pass(self) -> PassTimes | None:
        """When the buckets of the last synchronised backward pass were ready, sent and reduced."""
        return self.reducer.last

    def rows(self) -> tuple[BucketRow, ...]:
        """The buckets, with the times of the last synchronised backward pass."""
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
"""Of this process."""


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
        _check_arguments(module, bucket_cap_mb, plan, initial)
        leave_shared_memory([*module.parameters(), *module.buffers()])
        replicated_class = _replicated(type(module))
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
    plain = type(module)
    module.__class__ = replicated_class
    vars(module)["_partita_replication"] = replication
    handle = module.register_forward_pre_hook(_before_forward, prepend=True)
    found = ref(module)

    def undo() -> None:
        handle.remove()
        replicated = found()
        if replicated is not None:
            replicated.__class__ = plain
            del vars(replicated)["_partita_replication"]

    replication.on_close(undo)
    _LOG.info("buckets of %s:\n%s", plain.__name__, replication)
    return cast(Replicated, module)


def _replicated(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``plain`` that is a `Replicated` too."""
    body: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    if plain.forward.__module__.startswith("torch."):
        body["forward"] = _forward  # Dynamo would trace through the hook of a module of torch's own
    return type(plain.__name__, (Replicated, plain), body)


def _check_arguments(module: nn.Module, bucket_cap_mb: float, plan: object, initial: str) -> None:
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
        raise ArgumentError("the module is replicated already: call replicate() once, on the plain module")
    if not bucket_cap_mb > 0:
        raise ArgumentError(f"bucket_cap_mb is {bucket_cap_mb}: give a size above 0, in MiB")
    if not (plan is None or plan == "measured" or isinstance(plan, BucketPlan)):
        raise ArgumentError(f"plan is a BucketPlan, 'measured' or None, got {plan!r}")
    if initial not in ("broadcast", "check"):
        raise ArgumentError(f"initial is 'broadcast' or 'check', got {initial!r}")


def _nothing() -> None:
    """There is nothing to undo yet."""


def _created(cls: type[nn.Module], *args: Any) -> nn.Module:
    return cls.__new__(cls, *args)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(Replicated, self).forward(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(module: nn.Module, _args: Any) -> None:
    replication = vars(module).get("_partita_replication")
    if replication is not None:
        replication.before_forward(module)


def _without_hook(state: dict[str, Any]) -> dict[str, Any]:
    hooks = state.get("_forward_pre_hooks")
    if not hooks:
        return state
    kept = type(hooks)((key, hook) for key, hook in hooks.items() if hook is not _before_forward)
    return {**state, "_forward_pre_hooks": kept}


def _fact(name: str, value: torch.Tensor) -> tuple[Any, ...]:
    return name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.requires_grad
