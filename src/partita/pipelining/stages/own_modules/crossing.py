"""A description, without data, of what a stage of the user's own module returns for one microbatch."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partita._torch.containers.pytree import TreeSpec, flatten, flatten_with_path, unflatten
from partita._torch.fake_module import run_on_fakes
from partita.capture.open_sizes.sizes import evaluated
from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining.interface.values import Constant, Value, describe
from partita.pipelining.stages.own_modules.input_key import input_key

__all__ = ["Crossing", "arguments_of", "inferred", "output_name", "refuse_distributed"]


@dataclass(frozen=True, eq=False)
class Crossing:
    """The leaves and the structure of a nested value that crosses a border.

    Attributes:
        leaves: left to right: a `Value` for a tensor, a `Constant` for anything else.
        strides: those of each leaf; empty for a constant.
        spec: the structure.
        root: what the names of the leaves begin with.
    """

    leaves: tuple[Value | Constant, ...]
    strides: tuple[tuple[int, ...], ...]
    spec: TreeSpec
    root: str = field(repr=False)

    @classmethod
    def of(cls, tree: Any, root: str) -> Crossing:
        """Describe each leaf of ``tree``; ``root`` is what paths in messages begin with."""
        named_leaves, spec = flatten_with_path(tree, root)
        strides = tuple(leaf.stride() if isinstance(leaf, Tensor) else () for _, leaf in named_leaves)
        leaves = tuple(
            Value.of(path, leaf) if isinstance(leaf, Tensor) else Constant(path, leaf)
            for path, leaf in named_leaves
        )
        return cls(leaves, strides, spec, root)

    @cached_property
    def data(self) -> bytes:
        """The bytes that describe it to another rank: the value with tensors on the meta device, pickled.

        Raises:
            ExecutionError: a leaf that is no tensor and can't be pickled.
        """
        try:
            return pickle.dumps(self.on_meta())
        except Exception as error:  # pickle raises what __reduce__ raises
            odd = sorted({type(leaf.value).__name__ for leaf in self.leaves if isinstance(leaf, Constant)})
            raise ExecutionError(
                f"{self.root} holds {', '.join(odd)}, which can't be sent to another process ({error}): "
                "return tensors, numbers and strings in tuples, lists and dicts"
            ) from error

    @cached_property
    def key(self) -> Hashable:
        """Equal for values that differ in the data of their tensors alone."""
        return input_key(self.on_meta())

    @classmethod
    def read(cls, data: bytes, root: str) -> Crossing:
        """From the `data` of another rank."""
        return cls.of(pickle.loads(data), root)

    def on_meta(self) -> Any:
        """The value, with tensors on the meta device."""
        leaves = [
            leaf.value
            if isinstance(leaf, Constant)
            else torch.empty_strided(
                evaluated(leaf.shape, {}),
                stride,
                dtype=leaf.dtype,
                device="meta",
                requires_grad=leaf.requires_grad,
            )
            for leaf, stride in zip(self.leaves, self.strides, strict=True)
        ]
        return unflatten(leaves, self.spec)

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The tensors among the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Value))

    def filled(self, tensors: Mapping[str, Any]) -> Any:
        """The value itself, from its tensors by name."""
        flat = [tensors[leaf.name] if isinstance(leaf, Value) else leaf.value for leaf in self.leaves]
        return unflatten(flat, self.spec)

    def tensors(self, output: Any, who: str) -> list[Tensor]:
        """The tensors of a value that this should describe; their sizes are checked elsewhere.

        Raises:
            SignatureMismatch: another structure, or something else that is no tensor.
        """
        leaves, spec = flatten(output)
        if spec != self.spec:
            raise SignatureMismatch(
                f"{who} returns {spec}, but {self.spec} was found for these inputs: return the same "
                "structure for the same shapes, or give its PipelineStage output_args"
            )
        tensors = []
        for wanted, leaf in zip(self.leaves, leaves, strict=True):
            if isinstance(wanted, Value) and isinstance(leaf, Tensor) and leaf.dim() == len(wanted.shape):
                tensors.append(leaf)
            elif isinstance(wanted, Value) or not wanted.fits(leaf):
                what = describe(leaf) if isinstance(leaf, Tensor) else repr(leaf)
                raise SignatureMismatch(
                    f"{who} returns {what} for {wanted.describe()}: what depends on data must be a tensor, "
                    "since the other stages are told of everything else before it is computed"
                )
        return tensors


def output_name(stage: int) -> str:
    """What the names of a stage's outputs begin with."""
    return f"output of stage {stage}"


def arguments_of(value: Any) -> tuple[Any, ...]:
    """How a stage is called with what the stage before it returned: a tuple or list is several arguments."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def refuse_distributed(tree: Any, root: str) -> None:
    """Refuse a value that belongs to several ranks.

    Raises:
        ExecutionError: there is a DTensor in a value that goes to the next stage.
    """
    for path, leaf in flatten_with_path(tree, root)[0]:
        if isinstance(leaf, DTensor):
            raise ExecutionError(
                f"{path} is a DTensor ({leaf.placements} of {leaf.device_mesh}), and stages hand plain "
                "tensors on: return to_local() of it, and let the next stage call DTensor.from_local()"
            )


def inferred(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, stage: int
) -> tuple[Any, list[bool]]:
    """What ``module`` returns for such arguments (tensors without memory), and for each leaf of ``(args,
    kwargs)`` whether the module writes to it. Nothing is computed and nothing of the module changes.

    Raises:
        ExecutionError: it can't be run without data; says what to give.
    """
    try:
        return run_on_fakes(module, args, kwargs, device)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExecutionError(
            f"what stage {stage} returns for inputs like {list(args)} can't be found without running it on "
            f"data ({type(error).__name__}: {reason}). If that is the module's own error, mend it; if the "
            "module needs data to go on, give its PipelineStage output_args: an example of what it returns, "
            "or a function that takes its inputs and returns one"
        ) from error
