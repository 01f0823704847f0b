"""What a stage that is a plain module hands on for one microbatch, described without its data."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partita._torch.fake_module import run_on_fakes
from partita._torch.pytree import TreeSpec, flatten, flatten_with_path, unflatten
from partita.capture.sizes import evaluated
from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining.routes import Constant, Value, describe
from partita.pipelining.stages.input_key import input_key

__all__ = ["Crossing", "arguments_of", "inferred", "output_name", "refuse_distributed"]


@dataclass(frozen=True, eq=False)
class Crossing:
    """Nested containers, taken apart.

    A tensor that is transposed in memory crosses as it lies there, and is turned back where it arrives: it
    is not copied, and what is computed from it there has the bits that it has in the whole model.

    Attributes:
        leaves: left to right: a `Value` (tensors, as they lie in memory) or a `Constant` (anything else, as
            it is).
        orders: for each leaf its dimensions, as they lie in memory; empty for a constant.
        spec: the structure.
        root: what the leaves are called after.
    """

    leaves: tuple[Value | Constant, ...]
    orders: tuple[tuple[int, ...], ...]
    spec: TreeSpec
    root: str = field(repr=False)

    @classmethod
    def of(cls, tree: Any, root: str) -> Crossing:
        """Describe a value.

        Args:
            root: what its leaves are called after.
        """
        found, spec = flatten_with_path(tree, root)
        orders = tuple(_order(leaf) if isinstance(leaf, Tensor) else () for _, leaf in found)
        leaves = tuple(
            Value.of(path, leaf.permute(order)) if isinstance(leaf, Tensor) else Constant(path, leaf)
            for (path, leaf), order in zip(found, orders, strict=True)
        )
        return cls(leaves, orders, spec, root)

    @cached_property
    def data(self) -> bytes:
        """What is sent: the value with tensors on the meta device, pickled.

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
        """Equal for values of one kind."""
        return input_key(self.on_meta())

    @classmethod
    def read(cls, data: bytes, root: str) -> Crossing:
        """From what another rank sent."""
        return cls.of(pickle.loads(data), root)

    def on_meta(self) -> Any:
        """The value with tensors that have no memory."""
        return unflatten(_on_meta(self.leaves, self.orders), self.spec)

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The tensors among the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Value))

    def filled(self, tensors: Mapping[str, Any]) -> Any:
        """The value itself, its tensors by name."""
        flat = [
            tensors[leaf.name].permute(_inverse(order)) if isinstance(leaf, Value) else leaf.value
            for leaf, order in zip(self.leaves, self.orders, strict=True)
        ]
        return unflatten(flat, self.spec)

    def tensors(self, output: Any, who: str) -> list[Tensor]:
        """The tensors of a value that should be like this, as they cross; sizes are checked elsewhere.

        Raises:
            SignatureMismatch: another structure, or something else that is no tensor.
        """
        leaves, spec = flatten(output)
        if spec != self.spec:
            raise SignatureMismatch(
                f"{who} returns {spec}, but {self.spec} was found for these inputs: return the same "
                "structure for the same shapes, or give its PipelineStage output_args"
            )
        found = []
        for wanted, leaf, order in zip(self.leaves, leaves, self.orders, strict=True):
            if isinstance(wanted, Value) and isinstance(leaf, Tensor) and leaf.dim() == len(order):
                found.append(leaf.permute(order))
            elif isinstance(wanted, Value) or not wanted.fits(leaf):
                what = describe(leaf) if isinstance(leaf, Tensor) else repr(leaf)
                raise SignatureMismatch(
                    f"{who} returns {what} for {wanted.describe()}: what depends on data must be a tensor, "
                    "since the other stages are told of everything else before it is computed"
                )
        return found


def output_name(stage: int) -> str:
    """What the leaves of a stage's output are called after."""
    return f"output of stage {stage}"


def arguments_of(value: Any) -> tuple[Any, ...]:
    """How a stage is called with what the stage before it returned: a tuple or list is several arguments."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def refuse_distributed(tree: Any, root: str) -> None:
    """What crosses is this rank's own: a DTensor belongs to several.

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


def _on_meta(leaves: Sequence[Value | Constant], orders: Sequence[tuple[int, ...]]) -> list[Any]:
    """Tensors without memory for values; constants as they are."""
    return [
        leaf.value
        if isinstance(leaf, Constant)
        else torch.empty(evaluated(leaf.shape, {}), dtype=leaf.dtype, device="meta")
        .permute(_inverse(order))
        .requires_grad_(leaf.requires_grad)
        for leaf, order in zip(leaves, orders, strict=True)
    ]


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost in memory to the innermost."""
    strides = tensor.stride()
    if any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        return tuple(range(tensor.dim()))  # broadcast: it has to be copied anyway
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))
