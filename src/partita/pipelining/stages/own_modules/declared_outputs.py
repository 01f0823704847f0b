"""What a stage returns, as declared by the user: for modules that can't be run without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, tree_map
from partita.pipelining.stages.own_modules.crossing import arguments_of

__all__ = ["Declared", "declared_outputs"]


class Declared(Protocol):
    """Returns what a module returns for these arguments, with tensors on the meta device."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...


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
        return _requiring_grad(self.function(*args, **kwargs), module, args)


@dataclass(frozen=True)
class _ByExample:
    """``batch``: of the inputs that the example belongs to; None where it holds for all."""

    output: Any
    batch: int | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        now = _batch(args)
        if self.batch is None or now is None or now == self.batch:
            return _requiring_grad(self.output, module, args)
        return _requiring_grad(
            tree_map(lambda leaf: _with_batch(leaf, self.batch, now), self.output), module, args
        )


def _on_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _batch(args: tuple[Any, ...]) -> int | None:
    """The first dimension of the first tensor that has one."""
    tensors = (leaf for leaf in flatten(args)[0] if isinstance(leaf, Tensor))
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), None)


def _with_batch(leaf: Any, example_batch: int | None, batch: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != example_batch:
        return leaf
    return leaf.new_empty((batch, *leaf.shape[1:]))


def _requiring_grad(output: Any, module: nn.Module, args: tuple[Any, ...]) -> Any:
    """The same, whose floating-point tensors require a gradient where a parameter or an argument does."""
    inputs = (leaf for leaf in flatten(args)[0] if isinstance(leaf, Tensor))
    trained = any(value.requires_grad for value in (*module.parameters(), *inputs))

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        floating = leaf.is_floating_point() or leaf.is_complex()
        return torch.empty_like(leaf, device="meta", requires_grad=trained and floating)

    return tree_map(like, output)
