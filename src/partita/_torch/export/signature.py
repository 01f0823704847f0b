"""How a call of an exported module, or of one operator in it, binds its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.export._tree_utils import reorder_kwargs
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from partita.errors import ArgumentError
from partita.listing import listed

__all__ = ["Signature", "all_arguments", "all_keywords", "signature_of"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def all_arguments(target: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the positional arguments of an operator's call with the defaults of those left out at the end;
    ``args`` for anything but an operator overload.

    >>> import torch
    >>> all_arguments(torch.ops.aten.dropout.default, ("x", 0.5, True))
    ('x', 0.5, True)
    >>> all_arguments(torch.ops.aten.sum.dim_IntList, ("x", [0]))
    ('x', [0], False)
    """
    if not isinstance(target, OpOverload):
        return tuple(args)
    rest = [argument for argument in target._schema.arguments if not argument.kwarg_only][len(args) :]
    if not all(argument.has_default_value() for argument in rest):
        return tuple(args)
    return (*args, *(argument.default_value for argument in rest))


def all_keywords(target: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an operator's call with the defaults of those left out; ``kwargs`` for
    anything but an operator overload.

    >>> import torch
    >>> all_keywords(torch.ops.aten.scaled_dot_product_attention.default, {"enable_gqa": True})
    {'scale': None, 'enable_gqa': True}
    """
    if not isinstance(target, OpOverload):
        return dict(kwargs)
    defaults = {
        argument.name: argument.default_value
        for argument in target._schema.arguments
        if argument.kwarg_only and argument.has_default_value()
    }
    return {**defaults, **kwargs}


class Signature:
    """How the arguments of an exported module become its placeholders, and its flat outputs the model's
    result. It can be pickled.

    Args:
        in_spec: of ``(args, kwargs)`` as they were at capture.
        out_spec: of what the model returned.
        parameters: names of the positional parameters of the model's ``forward``, in order.
        variadic: the name of the one that takes any number (``*args``); empty where there is none.
    """

    def __init__(
        self,
        in_spec: pytree.TreeSpec,
        out_spec: pytree.TreeSpec,
        parameters: Sequence[str] = (),
        variadic: str = "",
    ) -> None:
        self.in_spec = in_spec
        self.out_spec = out_spec
        self.parameters = tuple(parameters)
        self.variadic = variadic

    def __deepcopy__(self, memo: dict[int, Any]) -> Signature:
        """Itself: it never changes."""
        return self

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return one value a placeholder, in order.

        Raises:
            ArgumentError: an argument is missing, was not there at capture, or has another structure.
        """
        args, kwargs = self.bind(args, kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            raise ArgumentError(
                f"the arguments are built like {spec}, but the model was captured with {self.in_spec}: give "
                "tuples, lists and dicts of the same lengths and keys, or capture it again"
            )
        return flat

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """Return the flat outputs in the structure of the model's result."""
        return pytree.tree_unflatten(list(flat), self.out_spec)

    def by_parameter(self, flat: Sequence[Any]) -> dict[str, Any] | None:
        """Return one value a placeholder in the structure of the arguments, by the names of their parameters
        (of ``*args`` a tuple); None where one has no name, or lies in anything but dicts, lists and tuples.
        """
        specs = [self.in_spec]
        while specs:
            spec = specs.pop()
            if not spec.is_leaf() and spec.type not in (dict, list, tuple):
                return None
            specs += spec.children()
        args, kwargs = pytree.tree_unflatten(list(flat), self.in_spec)
        rest = args[len(self.parameters) :]
        if rest and not self.variadic:
            return None
        return {
            **dict(zip(self.parameters, args, strict=False)),
            **({self.variadic: rest} if rest else {}),
            **kwargs,
        }

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, each by position or by name as at capture.

        Raises:
            ArgumentError: an argument is missing, given twice, or was not there at capture.
        """
        positional, named = self._captured()
        names = self.parameters[:positional]
        differs = len(args) != positional or kwargs.keys() != named.keys()
        if len(names) == positional and differs:
            args, kwargs = self._rebound(args, kwargs, names, tuple(named))
        elif differs:
            raise ArgumentError(
                f"the model is called with {len(args)} arguments by position and {listed(kwargs) or 'none'} "
                f"by name, and was captured with {positional} by position and {listed(named) or 'none'} "
                f"by name: give as many, since *{self.variadic or 'args'} has no names, or capture it again "
                "with these"
            )
        return args, reorder_kwargs(dict(kwargs), self.in_spec) if kwargs else {}

    def _rebound(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], named: Sequence[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > len(self.parameters):
            raise ArgumentError(
                f"the model takes {len(self.parameters)} positional arguments, got {len(args)}"
            )
        values = dict(zip(self.parameters, args, strict=False))
        twice = sorted(values.keys() & kwargs.keys())
        values.update(kwargs)
        wanted = [*names, *named]
        missing = [name for name in wanted if name not in values]
        extra = [name for name in values if name not in wanted]
        if twice or missing or extra:
            problems = {"given twice": twice, "missing": missing, "not there at capture": extra}
            which = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
            cure = "give exactly these, or capture it again with the others"
            for name, value in values.items():
                if isinstance(value, Mapping) and missing and {*missing} <= {*value}:
                    cure = f"{name} is a {type(value).__name__} that has them, so give its items by name (**)"
            raise ArgumentError(f"arguments {which}. The model was captured with {', '.join(wanted)}: {cure}")
        return tuple(values[name] for name in names), {name: values[name] for name in named}

    def _captured(self) -> tuple[int, dict[str, None]]:
        args, kwargs = self.in_spec.children()
        return args.num_children, dict.fromkeys(kwargs.context)


def signature_of(module: GraphModule, forward: Callable[..., Any]) -> Signature:
    """Return the signature of a module that `export_module` made.

    Args:
        forward: the model's own, for the names of its parameters.
    """
    info = module.graph._codegen.pytree_info  # type: ignore[attr-defined]
    parameters = inspect.signature(forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    variadic = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]
    return Signature(info.in_spec, info.out_spec, names, *variadic)
