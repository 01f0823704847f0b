"""A part of a model that can be run alone, on inputs that are cut off from what made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import tree_map
from partita.pipelining.compiled.compiled_forward import CompiledForward
from partita.pipelining.interface.compile_options import CompileOptions

__all__ = ["UnitRun"]


@dataclass(frozen=True)
class UnitRun:
    """How to run one unit, again and again. Nothing of the user's may change by it.

    Attributes:
        name: of the unit.
        call: takes `inputs` and returns a sequence of outputs.
        inputs: what it is called with; tensors, and containers of them, or anything else.
        parameters: those that it trains; their ``.grad`` is written to.
        copied: positions of the inputs that it writes to: it is given copies of these.
        seeded: for each output whether a gradient comes back to it; all of them where it is None.
        is_last: whether nothing of the model comes after it.
        module: what `call` calls, where that can be compiled.
    """

    name: str
    call: Callable[..., Sequence[Any]]
    inputs: tuple[Any, ...]
    parameters: tuple[nn.Parameter, ...] = ()
    copied: frozenset[int] = frozenset()
    seeded: tuple[bool, ...] | None = None
    is_last: bool = False
    module: nn.Module | None = None

    def compile(self, options: CompileOptions) -> None:
        """Let it run as a compiled stage does."""
        if self.module is not None:
            vars(self.module)["forward"] = CompiledForward(self.module, options, f"the unit {self.name}")

    def leaves(self) -> tuple[list[Tensor], list[Any]]:
        """The tensors at which gradients arrive, and the arguments made of them, as in a stage."""
        wanted: list[Tensor] = []

        def detached(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            leaf = value.detach()
            if value.requires_grad:
                wanted.append(leaf.requires_grad_())
            return leaf

        arguments = [
            tree_map(_copied, tree_map(detached, value))
            if position in self.copied
            else tree_map(detached, value)
            for position, value in enumerate(self.inputs)
        ]
        return wanted, arguments

    def roots(self, outputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """What a backward pass starts from, and a gradient for each."""
        seeded = self.seeded if self.seeded is not None else (True,) * len(outputs)
        roots = [
            output
            for output, wants in zip(outputs, seeded, strict=True)
            if wants and isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None
        ]
        return roots, [torch.ones_like(root) for root in roots]

    def prepare_gradients(self) -> None:
        """Give each parameter a ``.grad`` to add to, as it has in all microbatches but the first."""
        for parameter in self.parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def drop_gradients(self) -> None:
        """Take them away again."""
        for parameter in self.parameters:
            parameter.grad = None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
