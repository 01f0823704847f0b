"""A pass whose outermost modules count as one function each: the ones of earlier stages are not run at all.

::

    embed_tokens ─ mask ─ rotary_emb ─ layer 0 ─ layer 1 ─ layer 2 ─ layer 3 ─ norm ─ lm_head
    not run        replayed  not run    not run   not run  │ run at full speed │ the pass stops
                                                           └ this stage

A `StagePass` lets the code of modules before its stage run again, for what it may do to Python objects. In
decoding a pass is one token long and that would be most of it. So here a stage hands on what its modules
return, and what they change in the objects that stay (`StayingState`) and in dicts and lists that they are
given. What else a module may change in Python, its own attributes or those of others, stays on its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partita._torch.containers.pytree import flatten_registered, unflatten
from partita._torch.fake.ghosts import is_ghostly, undisturbed
from partita._torch.fake.suspended_mode import suspended
from partita._torch.modules.calls import Around
from partita.errors import ExecutionError
from partita.pipelining.blocks.current_pass import EndOfStage, no_current_pass
from partita.pipelining.blocks.cut import Site
from partita.pipelining.blocks.packet import Packet
from partita.pipelining.blocks.replaying.answers import RaisedError, all_tensors, tensors_in
from partita.pipelining.blocks.stage_module import StageModule
from partita.pipelining.blocks.stage_pass import StagePass
from partita.pipelining.blocks.staying_state import StateChange, StayingObject, StayingState
from partita.pipelining.blocks.tensor_attributes import TensorAttributes

__all__ = ["PassResult", "StageDecoder"]


@dataclass(frozen=True)
class PassResult:
    """What one stage gives for one call of the model.

    Attributes:
        output: of the last stage what the model returns, of the others a `Packet`.
        changes: what this stage has changed in the objects that stay.
    """

    output: Any
    changes: tuple[StateChange, ...]


@dataclass(frozen=True, slots=True)
class _Changes:
    """What one module has changed; a leaf among what it returned."""

    changes: tuple[StateChange, ...]


class StageDecoder:
    """Runs one stage's part of calls of a model, with objects that stay on their stages.

    Args:
        module: the stage, in evaluation mode. Its parameters are not replaced while this object is used.
    """

    def __init__(self, module: StageModule) -> None:
        self.module = module
        self.device = module.home
        cut = module.block_cut
        self._whole = frozenset(path for stage in range(cut.stages) for path in cut.outermost(stage))
        self._attributes = TensorAttributes(module.code_that_runs)
        with module.ghosts_shown():
            self._names = module.names_by_identity()

    def run(
        self,
        packet: Packet,
        staying: StayingState,
        earlier: Mapping[int, tuple[StateChange, ...]],
        *,
        alone: bool = True,
    ) -> PassResult:
        """Run the stage's part of a call.

        Args:
            packet: what the stage was handed. The staying objects are not in it.
            staying: their copies on this stage; they become arguments of the model by their names.
            earlier: what the stages before this one have changed in this call.
            alone: no other series of calls is under way.

        Raises:
            ExecutionError: the model uses a tensor that no stage has handed on, or goes another way than on
                the stages before; or, not ``alone``, one of its modules keeps a tensor for the next call.
        """
        before = None if alone else self._attributes.look()
        with self.module.ghosts_shown(), torch.no_grad():
            stage_pass = _DecodingPass(self, packet, staying, earlier, self._names, self._whole)
            output = self.module.run_pass(stage_pass)
            changes = stage_pass.all_changes()
        if before is not None and (name := self._attributes.changed_since(before)) is not None:
            raise ExecutionError(
                f"stage {self.module.stage_index} keeps {name!r} for its next call in the module itself, "
                "where calls that take turns would find each other's: give in_flight=1, or keep it in an "
                "argument that is given as state"
            )
        return PassResult(output, changes)


class _DecodingPass(StagePass):
    """See above.

    Args:
        whole: the modules that count as one function.
    """

    def __init__(
        self,
        decoder: StageDecoder,
        packet: Packet,
        staying: StayingState,
        earlier: Mapping[int, tuple[StateChange, ...]],
        names: Mapping[int, str],
        whole: Collection[str],
    ) -> None:
        module = decoder.module
        super().__init__(
            module.stage_index,
            module.block_cut,
            packet,
            training=False,
            device=decoder.device,
            state=names,
        )
        self._staying = staying
        self._earlier = earlier
        self._whole = whole
        self._changes: list[StateChange] = []

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As in `StagePass`, and the staying objects by their names."""
        args, kwargs = super().arguments()
        return args, kwargs | self._staying.objects

    def _begin(self) -> None:
        super()._begin()
        for changes in self._earlier.values():
            self._staying.apply(changes)
        self._staying.begin()

    def _handed_on(self) -> Callable[[int], bool]:
        """As in `StagePass`, and all arguments: their numbers may be others than with the example."""
        may_be_used = super()._handed_on()
        arguments = self._packet.tensors
        return lambda number: number < arguments or may_be_used(number)

    def _add_first_seen(self, tensor: Tensor, site: Site) -> None:
        """As in `StagePass`; what was there before the call and stays is not handed on."""
        super()._add_first_seen(tensor, site)
        if self._staying.holds(tensor):
            self._tensors.state.add(len(self._tensors.references) - 1)

    def _returned(self, result: Any) -> Iterator[Tensor]:
        """All tensors but those in staying objects, some of which belong to other stages."""
        return all_tensors(result, leave_out=self._is_staying)

    def enter(self, path: str, arguments: Any) -> Around | None:
        """A module is about to be called. The outermost ones are called as one function."""
        super().enter(path, arguments)
        return partial(self._call_whole, path, arguments) if path in self._whole else None

    def _call_whole(self, path: str, arguments: Any, function: Callable[[], Any]) -> Any:
        if self._stopped:
            raise EndOfStage
        name = f"call of {path or 'the model'}"
        if self._code_of < self.stage:
            with undisturbed():
                leaves, structure, changes, filled = self._replay.answer(name)
            self._staying.apply(changes.changes)
            containers = self._containers(arguments)
            for place, content, form in filled:
                _fill(containers[place], unflatten([self._own(leaf) for leaf in content], form))
            return unflatten([self._own(leaf) for leaf in leaves], structure)
        containers = self._containers(arguments)
        before = [_content(container) for container in containers]
        try:
            with no_current_pass(), suspended(self):
                result = function()
        except Exception as error:
            self._changes += self._staying.changes()
            self._answers.append((name, RaisedError(error), None))
            with undisturbed():
                self._check_ghosts(tensors_in(arguments), name, error)
            raise
        with undisturbed():
            leaves, structure = flatten_registered(result, self._is_staying)
            self._check_ghosts(filter(_is_tensor, leaves), name, None)
            changes = self._staying.changes()
            self._changes += changes
            if self._records:
                output = self._recorded_leaves(name, leaves)
                filled = [
                    (place, self._recorded_leaves(name, content), form)
                    for place, (container, old) in enumerate(zip(containers, before, strict=True))
                    if not _is_same(now := _content(container), old)
                    for content, form in [flatten_registered(now, self._is_staying)]
                ]
                self._answers.append((name, (output, structure, _Changes(changes), filled), None))
        return result

    def _containers(self, arguments: Any) -> list[Any]:
        """The dicts and lists among the arguments of a module, in which it may leave something."""
        args, kwargs = arguments
        values = [*args, *kwargs.values()]
        return [
            value
            for value in values
            if isinstance(value, (MutableMapping, MutableSequence)) and not self._is_staying(value)
        ]

    def all_changes(self) -> tuple[StateChange, ...]:
        """What this stage has changed in the staying objects."""
        return (*self._changes, *self._staying.changes())

    def _check_ghosts(self, tensors: Iterator[Tensor], user: str, cause: Exception | None) -> None:
        """Raise ExecutionError where one of the tensors belongs to another stage."""
        for tensor in tensors:
            if is_ghostly(tensor) and self._device.type != "meta":
                raise self._missing(tensor, user) from cause

    def _recorded_leaves(self, name: str, leaves: list[Any]) -> list[Any]:
        return [
            StayingObject(staying) if (staying := self._staying.name_of(leaf)) else self._recorded(name, leaf)
            for leaf in leaves
        ]

    def _is_staying(self, value: Any) -> bool:
        return self._staying.name_of(value) is not None

    def _own(self, leaf: Any) -> Any:
        return self._staying.objects[leaf.name] if isinstance(leaf, StayingObject) else leaf


def _content(container: Any) -> dict[Any, Any] | list[Any]:
    return dict(container) if isinstance(container, MutableMapping) else list(container)


def _is_same(content: Any, before: Any) -> bool:
    """Whether two dicts, or two lists, hold the very same objects."""
    if len(content) != len(before):
        return False
    if isinstance(content, dict):
        return all(key in before and before[key] is value for key, value in content.items())
    return all(own is old for own, old in zip(content, before, strict=True))


def _fill(container: Any, content: Any) -> None:
    """Let a dict or list hold what another one holds."""
    container.clear()
    if isinstance(container, MutableMapping):
        container.update(content)
    else:
        container.extend(content)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
