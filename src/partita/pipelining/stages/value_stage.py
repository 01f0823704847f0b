"""Stages that exchange single tensors, each under a name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.errors import SignatureMismatch
from partita.pipelining.interface.layout import copied
from partita.pipelining.interface.routes import Routes
from partita.pipelining.interface.values import Value, describe
from partita.pipelining.stages.flight import Flight, leaf_of
from partita.pipelining.stages.stage import Stage

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
        numbers = routes.numbers
        leaves = {}
        for name, wants in self._takes:
            value = values[name]
            leaves[name] = leaf_of(
                value,
                wants_gradient=train and (value.requires_grad if wants is None else wants),
                leaf_uncut=value.is_leaf and name in self._model_inputs,
            )
        if self._leaves_are_inputs:
            inputs = [leaves[name] for name in self.border.inputs]
        else:
            inputs = [
                numbers[name] if name in numbers else self._module_input(name, leaves[name])
                for name in self.border.inputs
            ]
        outputs = dict(zip(self.border.outputs, self._compute(inputs), strict=True))
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

    @abstractmethod
    def _compute(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """The border's outputs, in order, from its inputs."""

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
        unsent = train and value.requires_grad and not expected.requires_grad
        if unsent or not expected.fits(value):
            raise SignatureMismatch(
                f"stage {self.index} makes {expected.name}: {describe(value)}, but the pipeline was cut for "
                f"{expected.describe()}: run it with the shapes, the dtypes of parameters, the autocast and "
                "the frozen parameters that it was cut with, or cut it again"
            )
