"""``torch.export`` without its region wrappers, as a module, and how that flattens inputs and outputs."""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from keyword import iskeyword
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._ops import OpOverload
from torch.distributions import Distribution
from torch.export._tree_utils import reorder_kwargs
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from partita._torch.containers.objects import open_objects
from partita._torch.export.conditions import Answers, answered
from partita._torch.export.eager_answers import eager_answers
from partita._torch.export.function_call import call_functions_directly, functions_kept
from partita._torch.export.open_sizes import batch_is_open
from partita._torch.export.users_code import is_users
from partita._torch.graph_module.generated_sources import sources_dropped
from partita._torch.graph_module.lazy_module import lazy_module
from partita.errors import ArgumentError

__all__ = [
    "METADATA_CHECK",
    "Signature",
    "Watch",
    "Way",
    "all_arguments",
    "all_keywords",
    "export_module",
    "signature_of",
]

METADATA_CHECK: Any = torch.ops.aten._assert_tensor_metadata.default
"""Export's check, in a graph, that a tensor has the dtype and device that it had while tracing."""

Way = Literal["eager", "exportable", "strict"]
"""How a model is traced."""


class Watch(Protocol):
    """Sees a model run while it is traced."""

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``forward`` is about to run."""

    def end(self, again: Callable[[], Any], result: Any) -> Any:
        """It has run; what is returned, unless it is None, takes the place of its result.

        Args:
            again: runs ``forward`` once more.
        """

    def stop(self) -> None:
        """The trace is over, whether ``forward`` has come to its end or not."""


_MOST_EXEMPT = 2
_HOOKS = tuple(
    f"_forward{when}_hooks{kind}" for when in ("", "_pre") for kind in ("", "_with_kwargs", "_always_called")
)
_CATCHING = inspect.Parameter.VAR_KEYWORD
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def export_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    way: Way,
    dynamic_shapes: Any = None,
    answers: Answers | None = None,
    watch: Watch | None = None,
) -> GraphModule:
    """Export ``model``: a flat graph that owns the model's parameters and buffers under their original names.

    It has none of the input checks that export puts around its own modules, and can be copied and pickled.
    Grad and autocast regions are the plain functions that enter and leave them.

    Args:
        way: ``"eager"`` follows Python, and the model takes the way that it takes when it simply runs;
            ``"exportable"`` follows Python too, and the model takes the way that it has for exporters;
            ``"strict"`` reads the bytecode of all that runs.
        dynamic_shapes: as ``torch.export`` has it; see ``symbolic.open_sizes`` for what becomes of it.
        answers: what the model is told where it branches on data (not in strict mode).
        watch: sees the model run; it is given the model that is traced, which shares the submodules of the
            user's (not in strict mode, nor where somebody has hooked on to the model, who would see more than
            one run).
    """
    opening = nullcontext() if dynamic_shapes is None else batch_is_open()
    with (
        _flat_regions(),
        _inference_as_no_grad(),
        _unchecked_distributions(),
        opening,
        _unmarked((args, kwargs)),
        functions_kept(),
        sources_dropped() as keep_sources,
        _quiet(),
    ):
        program = _traced(model, args, dict(kwargs), way, dynamic_shapes, answers or Answers(), watch)
        made = program.module(check_guards=False)
        assert isinstance(made, GraphModule)
        call_functions_directly(made)
        module = lazy_module(made.graph, type(model).__name__, training=made.training)
        state = vars(module)
        for holder in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[holder].update(vars(made)[holder])
        state.update({key: value for key, value in vars(made).items() if isinstance(value, torch.Tensor)})
        keep_sources(module)
    return module


def _traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    way: Way,
    dynamic_shapes: Any,
    answers: Answers,
    watch: Watch | None,
) -> torch.export.ExportedProgram:
    if way == "strict":  # would stumble over what opens objects
        return torch.export.export(model, args, kwargs, strict=True, dynamic_shapes=dynamic_shapes)
    opening = _opening_outputs(model)
    dynamic_shapes = _name_keywords(opening, kwargs, dynamic_shapes)
    if watch is not None and not _hooked(model):
        _watch(opening, watch)
    exempt: set[str] = set()
    first: Exception | None = None
    while True:
        with eager_answers(exempt) if way == "eager" else nullcontext(), answered(answers):
            try:
                return torch.export.export(opening, args, kwargs, strict=False, dynamic_shapes=dynamic_shapes)
            except Exception as error:  # torch.export raises dozens of kinds
                first = first or error  # it comes from the lines that the model's user knows
                file = _users_file(error)
                if way != "eager" or not file or file in exempt or len(exempt) == _MOST_EXEMPT:
                    raise first from first.__cause__
                # one part of the model (an expert's kernel) has no form that can be traced but the exportable
                exempt.add(file)
                answers.forget()
            finally:  # before the blocks around it end: each leaves what was entered last
                if watch is not None:
                    watch.stop()


def _users_file(error: BaseException) -> str:
    """Which of the model's own files an error comes from."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return frame.filename
    return ""


def _opening_outputs(model: nn.Module) -> nn.Module:
    """The same model, down to its very attributes, whose results export can take apart whatever their
    class.
    """
    twin = object.__new__(type(model))
    vars(twin).update(
        vars(model), **{name: vars(model)[name].copy() for name in _HOOKS if name in vars(model)}
    )
    twin.register_forward_hook(lambda _module, _args, result: open_objects(result))
    return twin


def _hooked(model: nn.Module) -> bool:
    everywhere = nn.modules.module
    return bool(
        model._forward_hooks
        or model._forward_pre_hooks
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
    )


def _watch(twin: nn.Module, watch: Watch) -> None:
    """Let ``watch`` see the run of ``twin``'s ``forward``."""
    twin.register_forward_pre_hook(
        lambda _module, args, kwargs: watch.begin(twin, args, kwargs), with_kwargs=True
    )
    twin.register_forward_hook(
        # of `module`, which stands for the twin: it knows by which name a module is reached that has two
        lambda module, args, kwargs, result: watch.end(lambda: module.forward(*args, **kwargs), result),
        with_kwargs=True,
        prepend=True,
    )


def _name_keywords(twin: nn.Module, kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Any:
    """Let what goes into a model's ``**kwargs`` be parameters of its own: export counts such arguments twice
    where sizes are open, and fails.

    Args:
        twin: its ``forward`` is replaced.

    Returns:
        dynamic_shapes: the same, of the parameters as they are now.
    """
    parameters = inspect.signature(twin.forward).parameters
    catching = [name for name, parameter in parameters.items() if parameter.kind is _CATCHING]
    extra = [name for name in kwargs if name not in parameters]
    if not catching or not extra or not all(name.isidentifier() and not iskeyword(name) for name in extra):
        return dynamic_shapes

    kept = [parameter for parameter in parameters.values() if parameter.kind is not _CATCHING]
    shown = inspect.Signature(
        [*kept, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra)]
    )
    running: list[Any] = []
    twin.register_forward_pre_hook(lambda module, _args: running.append(module))
    own = vars(twin).get("forward")
    written = inspect.getattr_static(type(twin), "forward")

    def named(*args: Any, **given: Any) -> Any:
        # export calls a stand-in, which knows by which name a module is reached that has two
        forward = written.__get__(running[-1], type(running[-1])) if own is None else own
        return forward(*args, **given)

    named.__signature__ = shown  # type: ignore[attr-defined]
    vars(twin)["forward"] = named
    if not isinstance(dynamic_shapes, dict) or catching[0] not in dynamic_shapes:
        return dynamic_shapes
    rest = {name: shape for name, shape in dynamic_shapes.items() if name != catching[0]}
    return {**rest, **dynamic_shapes[catching[0]]}


@contextmanager
def _quiet() -> Iterator[None]:
    """Of what torch says while it traces, such as that attributes were set, which are put back, the caller
    has no use; where warnings are errors, a trace would fail. And it logs the whole stack of an operator that
    has no form that can be traced, where another way may have one.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|contextlib)(\.|$)")
        if not log.isEnabledFor(logging.DEBUG):  # unless somebody looks for it
            log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            log.setLevel(level)


@contextmanager
def _flat_regions() -> Iterator[None]:
    """Leave out the two passes that fold regions into nested graphs: a no_grad region within an autocast
    region is lost in them, and gradients flow where the model has none.
    """
    folds = [
        (replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass"),
        (replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass"),
    ]
    before = [getattr(module, name) for module, name in folds]
    try:
        for module, name in folds:
            setattr(module, name, lambda gm, signature: (gm, signature))
        yield
    finally:
        for (module, name), function in zip(folds, before, strict=True):
            setattr(module, name, function)


@contextmanager
def _inference_as_no_grad() -> Iterator[None]:
    """Let regions of inference mode be traced as regions without gradients: export leaves no trace of them,
    and gradients flow where the model has none.
    """
    original = torch._C._InferenceMode
    torch._C._InferenceMode = _NoGradRegion  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch._C._InferenceMode = original  # type: ignore[misc]


@contextmanager
def _unmarked(arguments: Any) -> Iterator[None]:
    """Take the marks off the user's tensors that export writes its open sizes on, and leaves there where it
    fails: the next attempt, or the user's own compiler, would take them for the user's.
    """
    tensors = [value for value in pytree.tree_leaves(arguments) if isinstance(value, torch.Tensor)]
    attributes = [dict(vars(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, held in zip(tensors, attributes, strict=True):
            vars(tensor).clear()
            vars(tensor).update(held)


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Let ``torch.distributions`` be made without a look at whether their arguments are valid: those checks
    read values, which a trace does not have. Where a model asks for them itself (``validate_args=True``), it
    keeps them.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


class _NoGradRegion:
    """Stands in for torch's guard of inference mode; what can be seen of the two differs in errors only."""

    def __init__(self, mode: bool) -> None:
        self._mode = mode
        self._before = True

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not self._mode)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


def all_arguments(target: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The positional arguments of a call of an operator, with the defaults of those that were left out at the
    end. For anything but an operator overload, ``args``.

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
    """The keyword arguments of a call of an operator, with the defaults of those that were left out. For
    anything but an operator overload, ``kwargs``.

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
    """How the arguments of an exported module become its placeholders, and its flat outputs what the model
    returned. Can be pickled.

    Args:
        in_spec: of ``(args, kwargs)`` as they were at capture.
        out_spec: of what the model returned.
        parameters: names of the positional parameters of the model's ``forward``, in order.
    """

    def __init__(
        self, in_spec: pytree.TreeSpec, out_spec: pytree.TreeSpec, parameters: Sequence[str] = ()
    ) -> None:
        self.in_spec = in_spec
        self.out_spec = out_spec
        self.parameters = tuple(parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Signature:
        """Itself: it never changes (and torch's specs warn when they are copied)."""
        return self

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """One value a placeholder, in order.

        Raises:
            ArgumentError: arguments that the model was captured without, that are missing, or built
                otherwise.
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
        """The model's own output structure."""
        return pytree.tree_unflatten(list(flat), self.out_spec)

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, each given by position or by name as at capture.

        Raises:
            ArgumentError: an argument is missing, given twice, or was not there at capture.
        """
        positional, named = self._captured()
        names = self.parameters[:positional]
        if len(names) == positional and (len(args) != positional or kwargs.keys() != named.keys()):
            args, kwargs = self._rebound(args, kwargs, names, tuple(named))
        return args, reorder_kwargs(dict(kwargs), self.in_spec) if kwargs else {}

    def _rebound(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], named: Sequence[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > len(self.parameters):
            raise ArgumentError(
                f"the model takes {len(self.parameters)} positional arguments, got {len(args)}"
            )
        given = dict(zip(self.parameters, args, strict=False))
        twice = sorted(given.keys() & kwargs.keys())
        given.update(kwargs)
        wanted = [*names, *named]
        missing = [name for name in wanted if name not in given]
        extra = [name for name in given if name not in wanted]
        if twice or missing or extra:
            problems = {"given twice": twice, "missing": missing, "not there at capture": extra}
            told = "; ".join(f"{what}: {', '.join(found)}" for what, found in problems.items() if found)
            raise ArgumentError(
                f"arguments {told}. The model was captured with {', '.join(wanted)}: give exactly these, or "
                "capture it again with the others"
            )
        return tuple(given[name] for name in names), {name: given[name] for name in named}

    def _captured(self) -> tuple[int, dict[str, None]]:
        args, kwargs = self.in_spec.children()
        return args.num_children, dict.fromkeys(kwargs.context)


def signature_of(module: GraphModule, forward: Callable[..., Any]) -> Signature:
    """The signature of an exported module (one made by `export_module`).

    Args:
        forward: that of the model: it says what its parameters are called.
    """
    info = module.graph._codegen.pytree_info  # type: ignore[attr-defined]
    parameters = inspect.signature(forward).parameters.values()
    return Signature(info.in_spec, info.out_spec, [p.name for p in parameters if p.kind in _POSITIONAL])
