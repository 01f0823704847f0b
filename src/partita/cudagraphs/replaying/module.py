"""A region that is recorded once for each kind of call, and replayed from then on.

first call of a kind     run as it is, on a side stream (warm-up); its results count
second                   record on fixed addresses, then as every later one:
later                    copy inputs in -> replay -> copy written inputs back -> hand out outputs

Outputs that only backward reads are handed out in place, not copied. Whether somebody still has them is seen
at the next call; where somebody has (the forward of the next microbatch comes before this one's backward),
that call has a recording of its own, in memory of its own (a *slot*)::

    forward 0  backward 0  forward 1  backward 1      one slot
    forward 0  forward 1   backward 0  ...            two: forward 1 would overwrite what backward 0 needs

Where more are under way than there may be recordings, outputs are copied from then on.

Recordings of one slot share memory, and one may overwrite what newer ones have returned (see
`partita.cudagraphs.recording.pool`). Where somebody still reads that, the older one is recorded anew, so that
it is the newer of the two, or in the next slot where that goes on and on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.containers.pytree import flatten, unflatten
from partita._torch.tensors.storage import on_one_memory
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.facts.written_inputs import find_input_mutations
from partita.cudagraphs.recording.recorder import GraphRecorder
from partita.cudagraphs.replaying.call_signature import CallKey, CallSignature, describe_call, modes
from partita.cudagraphs.replaying.entry import CacheInfo, RegionRecording, fill_all
from partita.cudagraphs.replaying.free_slot import free_slot, is_free
from partita.cudagraphs.replaying.outputs import placed, plan_outputs
from partita.cudagraphs.replaying.recording_cache import RecordingCache
from partita.cudagraphs.replaying.repeated_call import RepeatedCall, repeated_call
from partita.errors import ExecutionError
from partita.graph.attributes import lookup

__all__ = ["CudaGraphModule"]

_LOG = logging.getLogger("partita.cudagraphs")


class CudaGraphModule(nn.Module):
    """Runs a graph by replaying recordings of it.

    Parameters and buffers that the graph holds, and inputs in ``static_inputs``, are used where they lie;
    where they lie elsewhere (one has moved; equal layers share the graph), that is another recording. Other
    inputs are copied to fixed addresses; those that the graph writes are copied back. Outputs are the
    caller's to keep. What can't be replayed (an input of an unknown tensor class, a written input that shares
    memory with another one) runs as it is. One call at a time, and not under autograd.

    It can be pickled and copied: recordings, shared memory and a compiled ``run`` stay behind, so that a copy
    warms up anew and runs ``gm``.

    Args:
        gm: the graph; its nodes should all be capturable (see `find_regions`).
        mutated_inputs: indices of the inputs that it writes; by default they are found.
        recorder: by default nothing is recorded, and the graph runs as it is.
        static_inputs: indices of the inputs that keep their addresses.
        transient_outputs: indices of the outputs that nobody needs after the next call; they are not copied.
        saved_outputs: indices of the outputs that are mostly given back before the next call, as what forward
            saves for backward; they are not copied as long as that is so.
        memory: shared by all regions of a model.
        max_recordings: more recordings than this in a slot evict the one unused for longest. After as many in
            a row that were never replayed again, the region gives up, and runs as it is. So many microbatches
            under way together have slots.
        run: runs the graph, by default ``gm`` itself; a compiled version, for example.
        name: for messages.

    >>> import torch
    >>> from partita.cudagraphs import ReplayRecorder
    >>> region = CudaGraphModule(torch.fx.symbolic_trace(lambda x: x.sin() + 1), recorder=ReplayRecorder())
    >>> [float(region(torch.zeros(()))) for _ in range(3)], region.cache_info().hits
    ([1.0, 1.0, 1.0], 1)
    """

    def __init__(
        self,
        gm: GraphModule,
        mutated_inputs: Collection[int] | None = None,
        *,
        recorder: GraphRecorder | None = None,
        static_inputs: Collection[int] = (),
        transient_outputs: Collection[int] = (),
        saved_outputs: Collection[int] = (),
        memory: StableMemory | None = None,
        max_recordings: int = 8,
        run: Callable[..., Any] | None = None,
        name: str = "region",
    ) -> None:
        super().__init__()
        if max_recordings < 1:
            raise ExecutionError(f"max_recordings is {max_recordings}: a region needs room for at least 1")
        self.gm = gm
        self.region = name
        self.recorder = recorder
        self.mutated_inputs = frozenset(
            find_input_mutations(gm.graph) if mutated_inputs is None else mutated_inputs
        )
        self._run = run
        self._static = frozenset(static_inputs)
        self._transient = frozenset(transient_outputs)
        self._saved = frozenset(saved_outputs)
        self._memory = memory if memory is not None else StableMemory()
        self._cache = RecordingCache(max_recordings, self._memory)
        self._copied_from: int | None = None
        self._declared_by: RepeatedCall | None = None
        self._calls_modules = any(node.op == "call_module" for node in gm.graph.nodes)
        self._attributes = _attributes(gm)

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process and this object."""
        cache = self._cache.fresh()
        parts = {"_cache": cache, "_memory": cache.memory, "_run": None, "_declared_by": None}
        return {**super().__getstate__(), **parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the attributes of the copied graph."""
        super().__setstate__(state)
        self._attributes = _attributes(self.gm)

    @property
    def max_recordings(self) -> int:
        """How many recordings it holds."""
        return self._cache.max_size

    def cache_info(self) -> CacheInfo:
        """What has been recorded so far."""
        return self._cache.info()

    def clear(self) -> None:
        """Drop all recordings and their memory; the next calls warm up and record again."""
        self._cache.clear()

    def forward(self, *args: Any) -> Any:
        """Run the graph.

        Raises:
            ExecutionError: gradients are on, and an input or a parameter needs one: a replay has no history.
        """
        # 1. What can't be replayed, whatever it is called with, runs as it is.
        cache = self._cache
        if self.recorder is None or cache.gave_up:
            return self._as_it_is(args)

        # 2. The same call as an earlier one is seen at a glance.
        state = self._state()
        settings = (modes(self.recorder.device_type), self._flags())
        for earlier in cache.repeated_calls():
            entry = earlier.entry
            if is_free(entry, self.recorder.pools) and earlier.is_repeated_by(
                args, state, settings, self._memory
            ):
                if earlier is not self._declared_by:
                    self._declare_static(args)
                    self._declared_by = earlier
                cache.find(entry.key, entry.slot)
                cache.note_repeated(earlier)
                cache.counts.hits += 1
                return self._replay(entry, args)

        # 3. Else: what this call has in common with others, a kind, and on what addresses it works.
        values, spec = flatten(args)
        self._check_grad(values, state)

        def kind_of(call: CallSignature) -> Hashable:
            return call.kind, spec, settings, _kinds(state)

        call = self._described(values, kind_of)
        if isinstance(call, str) or self._shares_written(args, values, call, state):
            return self._as_it_is(args)
        self._declare_static(values)
        kind = kind_of(call)
        key = CallKey((kind, call.addresses, tuple(tensor.data_ptr() for tensor in state)))

        # 4. A recording of such a call is replayed, in the first slot where that overwrites nothing that
        # somebody still has.
        slot = free_slot(cache, self.recorder.pools, key, call.slot)
        if slot is None:
            return self._overtake(args)
        recorded = cache.find(key, slot)
        if recorded is not None:
            written = self._written(args, len(values))
            repeated = repeated_call(recorded, args, call, state, settings, written)
            if repeated is not None:
                cache.note_repeated(repeated)
            cache.counts.hits += 1
            return self._replay(recorded, values)

        # 5. Else this call is the first of its kind, which warms up, or is recorded and replayed.
        if not cache.is_warm(kind):
            return self._warm_up(kind, args)
        if cache.unused >= cache.max_size and call.lies_in_slots:
            # called on what it has returned, it finds that at another place each time
            self._copied_from, cache.unused = 0, 0
            return self(*args)
        if cache.unused >= cache.max_size:
            self._give_up(
                f"its last {cache.unused} recordings were not used a second time: shapes, numbers or "
                "addresses of its inputs change at each call. Fix them, or raise max_recordings"
            )
            return self._as_it_is(args)
        try:
            entry = self._record(key, call, values, spec, state, slot)
        except ExecutionError as error:
            self._give_up(str(error))
            return self._as_it_is(args)
        cache.keep(entry)
        return self._replay(entry, values)

    def _described(
        self, values: Sequence[Any], kind_of: Callable[[CallSignature], Hashable]
    ) -> CallSignature | str:
        """The signature of a call. A slot of its own takes the memory of what a recording returns once more.
        So where that is more than the inputs that lie in slots, these are copied, for one recording.
        """
        assert self.recorder is not None
        about = values, self.recorder.device_type, self._static, self._memory
        call = describe_call(*about, copied_from=self._copied_from)
        if isinstance(call, str) or not call.slot:
            return call
        returned = self._cache.returned_bytes(kind_of(call), saved=not self._saved)
        return describe_call(*about, copied_from=1) if returned > call.slot_bytes else call

    def _declare_static(self, values: Sequence[Any]) -> None:
        """Inputs that keep their addresses lie there for other regions too."""
        self._declared_by = None
        if self._static:
            tensors = (values[number] for number in self._static if _is_tensor(values[number]))
            self._memory.declare(id(self), (tensor.untyped_storage().data_ptr() for tensor in tensors))

    def _as_it_is(self, args: Sequence[Any]) -> Any:
        self._cache.counts.uncaptured += 1
        return self.gm(*args) if self._run is None else self._run(*args)

    def _overtake(self, args: Sequence[Any]) -> Any:
        """Run as it is beside what somebody still has and a replay would overwrite."""
        self._cache.counts.overtaken += 1
        return self._as_it_is(args)

    def _copy_from_now_on(self) -> None:
        """Copy all outputs from now on."""
        if self._saved:
            _LOG.info("%s: its outputs are kept for too long, so they are copied from now on", self.region)
            self._saved = frozenset()
            self._cache.drop_slots()

    def _warm_up(self, kind: Any, args: Sequence[Any]) -> Any:
        assert self.recorder is not None
        result = self.recorder.warm_up(lambda: self._as_it_is(args))
        results = flatten(result)[0]
        sizes = {number: value.nbytes for number, value in enumerate(results) if _is_tensor(value)}
        saved = sum(size for number, size in sizes.items() if number in self._saved)
        kept = sum(size for number, size in sizes.items() if number not in self._transient) - saved
        if any(_is_tensor(value) and not value.is_leaf for value in results):
            self._give_up(
                "it switches gradients on, and a replay has no history: keep no_grad around all of it"
            )
        self._cache.note_warm(kind, kept, saved)
        return result

    def _record(
        self,
        key: CallKey,
        call: CallSignature,
        values: Sequence[Any],
        spec: Any,
        state: Sequence[torch.Tensor],
        slot: int,
    ) -> RegionRecording:
        assert self.recorder is not None
        inputs = list(values)
        for number in call.copied:
            inputs[number] = self.recorder.buffer(values[number])
        fill_all([inputs[number] for number in call.copied], [values[number] for number in call.copied])
        for number, address in enumerate(call.addresses):
            if address is not None and number not in self._static:
                inputs[number] = self._with_owners_storage(values[number])
        args = unflatten(inputs, spec)
        number = self.recorder.pools[slot].next_number()
        run = self.gm if self._run is None else self._run
        recording = self.recorder.record(lambda: run(*args), slot)
        results, result_spec = flatten(recording.result)
        buffers = tuple((number, inputs[number]) for number in call.copied)
        changed = self._written(args, len(values))
        written = tuple((number, buffer) for number, buffer in buffers if number in changed)
        copying = plan_outputs(results, inputs, call.copied, state, self._transient)
        in_place = copying
        if self._saved:
            in_place = plan_outputs(results, inputs, call.copied, state, self._transient, self._saved)
        return RegionRecording(
            key,
            slot,
            number,
            recording,
            buffers,
            written,
            in_place,
            copying,
            _nesting(recording.result, results, result_spec),
            self._copy_from_now_on,
        )

    def _with_owners_storage(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor on its owner's storage object: one that was handed out would stay in use here."""
        owner = self._memory.storage_at(value.untyped_storage().data_ptr())
        return value if owner is None else placed(value, owner, int(value.storage_offset()))

    def _written(self, args: Sequence[Any], flat: int) -> frozenset[int]:
        """Indices of what the graph writes among the ``flat`` values that the arguments hold."""
        if len(args) == flat:
            return self.mutated_inputs
        written: set[int] = set()
        start = 0
        for number, arg in enumerate(args):
            count = len(flatten(arg)[0])
            if number in self.mutated_inputs:
                written.update(range(start, start + count))
            start += count
        return frozenset(written)

    def _replay(self, entry: RegionRecording, values: Sequence[Any]) -> Any:
        assert self.recorder is not None
        return entry.replay(values, self.recorder.pools, copies=not self._saved)

    def _state(self) -> list[torch.Tensor]:
        """The parameters and buffers that the graph holds, as they are now."""
        tensors: list[torch.Tensor] = []
        for node in self._attributes:
            value = lookup(self.gm, node)
            if isinstance(value, nn.Module):
                tensors += [*value.parameters(), *value.buffers()]
            elif _is_tensor(value):
                tensors.append(value)
        return tensors

    def _flags(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self.gm.modules()) if self._calls_modules else ()

    def _check_grad(self, values: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        if any(_is_tensor(value) and value.requires_grad for value in (*values, *state)):
            raise ExecutionError(
                f"{self.region} is replayed, which leaves no history for backward, and gradients are on: "
                "call it under torch.no_grad(), or train with "
                'torch.compile(model, backend="partita_cudagraphs")'
            )

    def _shares_written(
        self, args: Sequence[Any], values: Sequence[Any], call: CallSignature, state: Sequence[torch.Tensor]
    ) -> bool:
        """Whether an input that would be copied lies on memory that the graph holds, or, where inputs are
        written and would be copied back, on that of another input.
        """
        copied = set(call.copied)
        if not copied:
            return False
        if not state and not self.mutated_inputs:
            return False
        written = self._written(args, len(values))
        inputs = [(number, value) for number, value in enumerate(values) if _is_tensor(value)]
        return any(
            not copied.isdisjoint(numbers) and (-1 in numbers or not written.isdisjoint(numbers))
            for numbers in on_one_memory([*((-1, tensor) for tensor in state), *inputs])
        )

    def _give_up(self, why: str) -> None:
        self._cache.clear()
        self._cache.gave_up = why
        _LOG.warning("%s runs uncaptured from now on: %s", self.region, why)


def _nesting(result: Any, leaves: Sequence[Any], spec: Any) -> Callable[[list[Any]], Any]:
    """What makes ``result`` of its leaves. Of most graphs it is a flat tuple."""
    if type(result) in (tuple, list) and [id(part) for part in result] == [id(leaf) for leaf in leaves]:
        return type(result)
    return lambda parts: unflatten(parts, spec)


def _attributes(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op in ("get_attr", "call_module")]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _kinds(state: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in state)
