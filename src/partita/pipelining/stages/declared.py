"""What a stage returns, as its user says it: for modules that can't be run without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, tree_map
from partita.pipelining.stages.crossing import arguments_of

__all__ = ["Declared", "declared_outputs"]


class Declared(Protocol):
    """Says what a module returns."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result for these arguments; tensors without memory."""
        ...


def declared_outputs(input_args: Any, output_args: Any) -> Declared | None:
    """From what a `PipelineStage` is given; None where nothing is declared."""
    if output_args is None:
        return None
    if callable(output_args) and not isinstance(output_args, Tensor):
        return _ByFunction(output_args)
    batch = None if input_args is None else _batch(arguments_of(input_args))
    return _ByExample(tree_map(_on_meta, output_args), batch)


@dataclass(frozen=True)
class _ByFunction:
    function: Callable[..., Any]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _marked(self.function(*args, **kwargs), module, args)


@dataclass(frozen=True)
class _ByExample:
    """``batch``: of the inputs that the example belongs to; None where it holds for all."""

    output: Any
    batch: int | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        now = _batch(args)
        if self.batch is None or now is None or now == self.batch:
            return _marked(self.output, module, args)
        return _marked(tree_map(lambda leaf: _rebatched(leaf, self.batch, now), self.output), module, args)


def _on_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _batch(args: tuple[Any, ...]) -> int | None:
    """The first dimension of the first tensor that has one."""
    tensors = (leaf for leaf in flatten(args)[0] if isinstance(leaf, Tensor))
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), None)


def _rebatched(leaf: Any, given: int | None, batch: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != given:
        return leaf
    return leaf.new_empty((batch, *leaf.shape[1:]))


def _marked(output: Any, module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Marked as in need of a gradient where it may be: the stage trains something, or is given something
    that needs one.
    """
    inputs = (leaf for leaf in flatten(args)[0] if isinstance(leaf, Tensor))
    trained = any(value.requires_grad for value in (*module.parameters(), *inputs))

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        floating = leaf.is_floating_point() or leaf.is_complex()
        return torch.empty_like(leaf, device="meta", requires_grad=trained and floating)

    return tree_map(like, output)
