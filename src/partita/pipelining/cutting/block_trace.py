"""A model's own ``forward`` as a graph in which its blocks stay closed, whatever they do inside.

::

    def forward(self, x, mask=None):           x, mask
        x = self.embed(x)                      embed     = call_module embed(x)
        for block in self.blocks:              blocks_0  = call_module blocks.0(embed, mask)
            x = block(x, mask)                 blocks_1  = call_module blocks.1(blocks_0, mask)
        return self.head(x)                    head      = call_module head(blocks_1)
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Tracer
from torch.fx.immutable_collections import immutable_dict, immutable_list

from partita._torch.containers import content_of, kind_of
from partita._torch.pytree import flatten
from partita.capture.modes import in_mode
from partita.errors import CaptureError, SignatureMismatch

__all__ = ["Binding", "trace_blocks"]

_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclass(frozen=True)
class Binding:
    """How a model's arguments become the inputs of its graph. Can be pickled.

    Attributes:
        signature: of the model's ``forward``.
        inputs: the arguments that hold tensors, in order.
        constants: the others that were given in the example; the graph holds for these values.
    """

    signature: inspect.Signature
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        """From example arguments.

        Raises:
            CaptureError: tensors among ``*args`` or ``**kwargs``.
        """
        plain = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(model.forward).parameters.values()
        ]
        signature = inspect.Signature(plain)
        given = signature.bind(*args, **kwargs).arguments
        held = {
            name
            for name, value in given.items()
            if any(isinstance(leaf, Tensor) for leaf in flatten(value)[0])
        }
        odd = [name for name in held if signature.parameters[name].kind not in _NAMED]
        if odd:
            raise CaptureError(
                f"the model takes tensors through {odd[0]!r}, which has no names for them: give each a name "
                'in forward, or leave frontend="modules" out'
            )
        inputs = tuple(name for name in given if name in held)
        return cls(signature, inputs, {name: value for name, value in given.items() if name not in held})

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The graph's inputs.

        Raises:
            TypeError: arguments that the model does not take.
            SignatureMismatch: other arguments than in the example, or another value for a constant.
        """
        given = self.signature.bind(*args, **kwargs).arguments
        for name in (*self.inputs, *self.constants):
            if name not in given:
                raise SignatureMismatch(
                    f"the model was cut with the argument {name!r}: give it, or cut it again"
                )
        for name, value in given.items():
            if name in self.inputs:
                continue
            if name not in self.constants or not _same(value, self.constants[name]):
                was = f"{self.constants[name]!r}" if name in self.constants else "left out"
                raise SignatureMismatch(
                    f"the argument {name!r} was {was} when the model was cut, and is another value now: cut "
                    "it again with this one"
                )
        return tuple(given[name] for name in self.inputs)


def trace_blocks(model: nn.Module, binding: Binding, opened: Collection[str]) -> GraphModule:
    """The graph of ``model.forward``, with calls of whole blocks in it. The model is not changed.

    A block is any submodule but an ``nn.Sequential`` and those in ``opened``.

    Args:
        opened: qualified names of submodules whose own ``forward`` is traced too.

    Raises:
        CaptureError: the way through ``forward`` depends on data, or is another one in evaluation mode.
    """
    graphs = []
    for training in (model.training, not model.training):
        with in_mode(model, training):
            graphs.append(_trace(model, binding, opened))
    if str(graphs[0].graph) != str(graphs[1].graph):
        raise CaptureError(
            f"{type(model).__name__}.forward takes another way in training than in evaluation: move the code "
            'that looks at self.training into a submodule, or leave frontend="modules" out'
        )
    return graphs[0]


def _trace(model: nn.Module, binding: Binding, opened: Collection[str]) -> GraphModule:
    twin = copy.copy(model)  # the same submodules and parameters
    constants = dict(binding.constants)
    positional_only = {
        name
        for name, parameter in binding.signature.parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    }
    if positional_only & constants.keys():
        raise CaptureError(
            f"the model takes {min(positional_only & constants.keys())!r} by position only, and it holds no "
            'tensor: leave frontend="modules" out'
        )

    def call(self: nn.Module, values: dict[str, Any]) -> Any:
        by_place = [values.pop(name) for name in binding.inputs if name in positional_only]
        return type(model).forward(self, *by_place, **values, **constants)

    names = ", ".join(binding.inputs)
    pairs = ", ".join(f"{name!r}: {name}" for name in binding.inputs)
    entry = eval(f"lambda self, {names}: call(self, {{{pairs}}})", {"call": call})
    twin.__class__ = type(type(model).__name__, (type(model),), {"partita_entry": entry})
    tracer = _BlockTracer(opened)
    try:
        graph = tracer.trace(twin)
    except Exception as error:  # whatever the model's code raises on a value that is not there
        raise CaptureError(
            f'frontend="modules" follows {type(model).__name__}.forward without data, with its submodules '
            f"closed, and can't: {type(error).__name__}: {error}. Move what depends on data into a submodule "
            "or make a PipelineStage of modules of your own"
        ) from error
    return GraphModule(model, graph, type(model).__name__)


class _BlockTracer(Tracer):
    """Starts at the entry that binds constants."""

    def __init__(self, opened: Collection[str]) -> None:
        super().__init__()
        self.traced_func_name = "partita_entry"
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        chained = isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward
        return not chained and module_qualified_name not in self._opened

    def create_arg(self, a: Any) -> Any:
        """A dict or list of another class than Python's own is made again by its class, in each run."""
        if kind_of(a) not in (dict, list, OrderedDict) or type(a) in (
            dict,
            list,
            immutable_dict,
            immutable_list,
        ):
            return super().create_arg(a)
        args, kwargs = _constructor(a)
        return self.create_node("call_function", type(a), self.create_arg(args), self.create_arg(kwargs))


def _constructor(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a container's class makes it of.

    Raises:
        TypeError: it is not made of its items, or of its fields.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if is_dataclass(value):
        kwargs = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    else:
        args = (dict(value) if isinstance(value, dict) else list(value),)
    if not _made_alike(value, args, kwargs):
        raise TypeError(f"forward makes a {type(value).__name__}, which can't be made again of what is in it")
    return args, kwargs


def _made_alike(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        again = type(value)(*args, **kwargs)
    except Exception:  # whatever a constructor that takes other arguments raises
        return False
    attributes = (getattr(again, "__dict__", {}), getattr(value, "__dict__", {}))
    for mine, theirs in ((again, value), attributes):
        left, right = content_of(mine), content_of(theirs)
        if len(left) != len(right) or any(a is not b for a, b in zip(left, right, strict=True)):
            return False
    return True


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)
