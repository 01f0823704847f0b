"""Stages that exchange single tensors, each under a name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from partita._torch.modules.contents import forward_hooks
from partita.errors import SignatureMismatch
from partita.pipelining.compiled.ahead import AheadOfStep
from partita.pipelining.compiled.compiled_forward import CompiledForward
from partita.pipelining.interface.layout import copied, zeros_like_sent
from partita.pipelining.interface.routes import Routes
from partita.pipelining.interface.values import Value, describe
from partita.pipelining.stages.data_parallel import gradient_reduction
from partita.pipelining.stages.flight import Flight, as_called, leaf_of
from partita.pipelining.stages.stage import Stage
from partita.planning import ActionKind

__all__ = ["ValueStage"]


class ValueStage(Stage):
    """A stage that takes and makes the tensors that its `routes` name."""

    def follow(self, routes: Routes) -> None:
        """See `Stage.follow`."""
        super().follow(routes)
        self._has_results = self.is_last
        extra = dict.fromkeys(routes.result_names if self._has_results else ()).keys() - {
            *self.border.outputs
        }
        takes = dict.fromkeys((*self.border.inputs, *sorted(extra)))
        wants = {name: value.requires_grad for name, value in routes.values.items()}
        self._takes = tuple((name, wants.get(name)) for name in takes if name not in routes.numbers)
        self._model_inputs = frozenset(value.name for value in routes.inputs)
        self._leaves_are_inputs = not (routes.numbers or self.border.written)

    @property
    def _crossing(self) -> Routes:
        """The routes of this microbatch."""
        return self.crossing[self._microbatch] if self.crossing else self.routes

    def _run(self, values: Mapping[str, Any], *, train: bool) -> tuple[Flight, dict[str, Any]]:
        routes = self._crossing
        leaves = {name: self._leaf(name, values[name], wants, train=train) for name, wants in self._takes}
        called = as_called(leaves, values, is_first=self.is_first)
        args, kwargs = self._arguments(self._inputs(called, routes.numbers))
        outputs = dict(zip(self.border.outputs, self._outputs(self._called(*args, **kwargs)), strict=True))
        for name, value in outputs.items():
            expected = routes.values.get(name)
            if expected is not None and value is None:  # of a branch on data that is not taken
                device = "cpu" if expected.on_host else self.device
                outputs[name] = torch.zeros(expected.shape, dtype=expected.dtype, device=device)
            elif expected is not None:
                self._check(expected, value, train)
        for name in self.border.reused:
            outputs[name] = copied(outputs[name])
        sources = {name: value for name, value in values.items() if value.requires_grad} if train else {}
        return Flight(leaves, outputs, sources, False), leaves | outputs

    def _leaf(self, name: str, value: Tensor, wants: bool | None, *, train: bool) -> Tensor:
        return leaf_of(
            value,
            wants_gradient=train and (value.requires_grad if wants is None else wants),
            leaf_uncut=value.is_leaf and name in self._model_inputs,
        )

    def _inputs(self, leaves: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> list[Any]:
        """The border's inputs, in order."""
        if self._leaves_are_inputs:
            return [leaves[name] for name in self.border.inputs]
        return [
            numbers[name] if name in numbers else self._module_input(name, leaves[name])
            for name in self.border.inputs
        ]

    def compile_ahead(self, arguments: Mapping[str, Tensor], kinds: Collection[ActionKind]) -> None:
        """See `Stage.compile_ahead`."""
        compiled = vars(self._inner).get("forward")
        if not isinstance(compiled, CompiledForward):
            return
        self._microbatch = 0
        values, numbers = self._crossing.values, self._crossing.numbers
        names = [name for name in self.border.inputs if name not in numbers]
        shapes = [(arguments[name] if name in arguments else values[name]).shape for name in names]
        train = ActionKind.B in kinds or ActionKind.I in kinds
        key = train, self._inner.training, tuple(numbers.items()), tuple(map(tuple, shapes))
        if key in compiled.compiled_ahead:
            return
        compiled.compiled_ahead.add(key)
        is_plain = self.module is self._inner and self.dw_builder is None
        if not is_plain or gradient_reduction(self._inner) is not None:
            return
        if next(forward_hooks(self._inner), None) is not None:  # they may call it with something else
            return
        with suppress(Exception):  # that of a wrong guess; any other one comes again when the stage runs
            self._compile_ahead(compiled, arguments, names, kinds)

    def _compile_ahead(
        self,
        compiled: CompiledForward,
        arguments: Mapping[str, Tensor],
        names: Sequence[str],
        kinds: Collection[ActionKind],
    ) -> None:
        values, train = self._crossing.values, ActionKind.B in kinds or ActionKind.I in kinds
        leaves, takes = {}, dict(self._takes)
        for name in names:
            value = arguments[name] if name in arguments else self._like_sent(values[name])
            if value is None:
                return
            leaves[name] = self._leaf(name, value, takes[name], train=train)
        missing = self._missing_gradients() if train else None
        step = AheadOfStep(ActionKind.B in kinds, ActionKind.I in kinds, missing)
        args, kwargs = self._arguments(self._inputs(leaves, self._crossing.numbers))
        compiled.compile_ahead(step, self._tied.owned_by_others(self._inner), args, dict(kwargs))

    def _like_sent(self, value: Value) -> Tensor | None:
        """A tensor that lies in memory as the value will; None where nobody can say how."""
        example = None if value.bundle else self._example(value.name)
        if example is None:
            return None
        device = torch.device("cpu") if value.on_host else self.device
        sizes: Any = value.shape  # numbers: those of a microbatch
        return zeros_like_sent(*example, sizes, value.dtype, device)

    def _missing_gradients(self) -> tuple[bool, ...] | None:
        """For each output that depends on what is trained whether no gradient will arrive for it; None where
        the loss decides it.
        """
        if self.is_last:
            return None
        only_returned = self.routes.only_returned
        return tuple(name in only_returned for name in self._trained())

    def _trained(self) -> Sequence[str]:
        """The outputs that depend on what is trained, each once, in order."""
        values = self._crossing.values
        return [name for name in self.border.outputs if values[name].requires_grad]

    @abstractmethod
    def _example(self, name: str) -> tuple[Sequence[int], Sequence[int]] | None:
        """Shape and strides of an example of an input; None where there is none."""

    @abstractmethod
    def _arguments(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What the module is called with, from the border's inputs."""

    @abstractmethod
    def _outputs(self, result: Any) -> Sequence[Tensor]:
        """The border's outputs, in order, from what the module returned."""

    def _module_input(self, name: str, leaf: Tensor) -> Tensor:
        """What the module is called with: a copy of what it writes to, since autograd refuses to write to a
        leaf, and the memory is the sender's where both stages are on one rank. Writes to the caller's own
        input stay visible to the caller.
        """
        own = name in self._model_inputs and not leaf.requires_grad
        return copied(leaf) if name in self.border.written and not own else leaf

    def _check(self, expected: Value, value: Any, train: bool) -> None:
        """Check an output that crosses.

        One that lost its gradient, since parameters have been frozen, is let through: its users send a
        gradient that nobody needs, and `roots_of` leaves it out. Where one has a gradient that its users do
        not send, parameters would stay untrained.
        """
        if train and value.requires_grad and not expected.requires_grad:
            raise SignatureMismatch(
                f"stage {self.index} makes {expected.name} with a gradient, which no stage sends back, since "
                "the parameters before it were frozen when the pipeline was cut: cut it while all are "
                "trained that ever will be, and freeze those of stage.module after that; or cut it again"
            )
        if not expected.fits(value):
            raise SignatureMismatch(
                f"stage {self.index} makes {expected.name}: {describe(value)}, but the pipeline was cut for "
                f"{expected.describe()}: run it with the shapes, the dtypes of parameters and the autocast "
                "that it was cut with, or cut it again"
            )
