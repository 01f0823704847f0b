"""``torch.export`` without its region wrappers, as a module."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from keyword import iskeyword
from operator import attrgetter
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import _trace
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from partita._torch.containers.objects import open_objects
from partita._torch.containers.replaced import replaced
from partita._torch.export.assigned_buffers import assignments_recorded, write_assigned_buffers_at_once
from partita._torch.export.conditions import Answers, answered
from partita._torch.export.conversions import conversions_apart, drop_aliases
from partita._torch.export.data_attribute import OTHER_DATA, data_is_detached
from partita._torch.export.eager_answers import eager_answers
from partita._torch.export.ended_calls import ended_calls_forgotten
from partita._torch.export.failure_logs import failure_logs_off
from partita._torch.export.function_call import call_functions_directly, functions_kept
from partita._torch.export.mapped_indexing import mapped_indexing_is_an_operator
from partita._torch.export.nested_regions import nested_regions_are_called
from partita._torch.export.open_sizes import batch_is_open
from partita._torch.export.parameter_buffers import parameter_buffers_as_tensors
from partita._torch.export.script_functions import script_functions_in_python
from partita._torch.export.trained_constants import put_leaves_back, unregistered_parameters
from partita._torch.export.users_code import is_users
from partita._torch.graph_module.generated_sources import sources_dropped
from partita._torch.graph_module.lazy_module import lazy_module
from partita.errors import CaptureError

__all__ = [
    "METADATA_CHECK",
    "Watch",
    "Way",
    "export_module",
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
            ``"exportable"`` follows Python too, and the model takes the way that it takes for exporters;
            ``"strict"`` reads the bytecode of all that runs.
        dynamic_shapes: as in ``torch.export``; see ``open_sizes`` for what becomes of it.
        answers: the answers where the model branches on data (not in strict mode).
        watch: sees the run of the model that is traced, which shares its submodules with the user's model
            (not in strict mode, nor where the model has hooks, which would see more than one run).
    """
    opening = nullcontext() if dynamic_shapes is None else batch_is_open()
    with (
        _transforms_ended(),
        _flat_regions(),
        _inference_as_no_grad(),
        script_functions_in_python(),
        opening,
        _unmarked((args, kwargs)),
        functions_kept(strict=way == "strict"),
        parameter_buffers_as_tensors(model) as put_own_buffers,
        unregistered_parameters() as parameters,
        sources_dropped() as keep_sources,
        _quiet(),
    ):
        program = _traced(model, args, dict(kwargs), way, dynamic_shapes, answers or Answers(), watch)
        exported = program.module(check_guards=False)
        assert isinstance(exported, GraphModule)
        put_leaves_back(program, exported, parameters)
        drop_aliases(exported)
        call_functions_directly(exported)
        write_assigned_buffers_at_once(exported)
        module = lazy_module(exported.graph, type(model).__name__, training=exported.training)
        state = vars(module)
        for holder in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[holder].update(vars(exported)[holder])
        state.update({key: value for key, value in vars(exported).items() if isinstance(value, torch.Tensor)})
        put_own_buffers(module)
        _check_data(exported, model)
        keep_sources(module)
    return module


def _check_data(exported: GraphModule, model: nn.Module) -> None:
    """Refuse a trace that took a tensor without data for a constant; non-strict export does so itself."""
    if any(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers())):
        return
    for node in exported.graph.find_nodes(op="get_attr"):
        if isinstance(attrgetter(str(node.target))(exported), FakeTensor):
            raise CaptureError(f"{node.target} in the graph is a tensor without data: {OTHER_DATA}")


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
        answering = eager_answers(exempt) if way == "eager" else nullcontext()
        with (
            answering,
            answered(answers),
            data_is_detached(),
            conversions_apart(),
            assignments_recorded(model),
            nested_regions_are_called(),
            mapped_indexing_is_an_operator(),
            ended_calls_forgotten(),
        ):
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
    """Return the file of the model that an error comes from; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return frame.filename
    return ""


def _opening_outputs(model: nn.Module) -> nn.Module:
    """Return a model with the same attributes whose results export can take apart, whatever their class."""
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
    """Give ``twin`` a ``forward`` with a named parameter for each argument that would go into ``**kwargs``:
    export counts such arguments twice where sizes are open, and fails.

    Returns:
        ``dynamic_shapes`` for these parameters.
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

    def named(*args: Any, **keywords: Any) -> Any:
        # export calls a stand-in, which knows by which name a module is reached that has two
        forward = written.__get__(running[-1], type(running[-1])) if own is None else own
        return forward(*args, **keywords)

    named.__signature__ = shown  # type: ignore[attr-defined]
    vars(twin)["forward"] = named
    if not isinstance(dynamic_shapes, dict) or catching[0] not in dynamic_shapes:
        return dynamic_shapes
    rest = {name: shape for name, shape in dynamic_shapes.items() if name != catching[0]}
    return {**rest, **dynamic_shapes[catching[0]]}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch while it traces. It warns of attributes that were set, though they are put back (where
    warnings are errors, a trace would fail). Of what can't be traced it logs stacks, and prints the graph so
    far, which may have thousands of lines, though another way of tracing may succeed.
    """
    with (
        warnings.catch_warnings(),
        failure_logs_off(),
        replaced(_trace, "print", lambda *_values, **_options: None),
    ):
        warnings.filterwarnings("ignore", module=r"(torch|contextlib)(\.|$)")
        yield


@contextmanager
def _flat_regions() -> Iterator[None]:
    """Skip export's two passes that fold regions into nested graphs: they lose a no_grad region within an
    autocast region, and gradients flow where the model has none.
    """

    def unchanged(gm: GraphModule, signature: Any) -> tuple[GraphModule, Any]:
        return gm, signature

    with (
        replaced(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", unchanged),
        replaced(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", unchanged),
    ):
        yield


@contextmanager
def _transforms_ended() -> Iterator[None]:
    """Leave the transforms of ``torch.func`` that were entered and not left: strict tracing, where it fails
    within one, leaves the process in it, where random calls and hooks on saved tensors are refused.
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        if torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            if no_hooks is None:
                torch._C._autograd._saved_tensors_hooks_enable()
            else:
                torch._C._autograd._saved_tensors_hooks_disable(no_hooks)


@contextmanager
def _inference_as_no_grad() -> Iterator[None]:
    """Trace regions of inference mode as no_grad regions: export would drop them, and gradients would flow
    where the model has none.
    """
    original = torch._C._InferenceMode
    torch._C._InferenceMode = _NoGradRegion  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch._C._InferenceMode = original  # type: ignore[misc]


@contextmanager
def _unmarked(arguments: Any) -> Iterator[None]:
    """Remove the attributes in which export marks open sizes on the user's tensors. Where it fails it leaves
    them there, and the next attempt, or the user's own compiler, would take them for the user's.
    """
    tensors = [value for value in pytree.tree_leaves(arguments) if isinstance(value, torch.Tensor)]
    attributes = [dict(vars(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, marks in zip(tensors, attributes, strict=True):
            vars(tensor).clear()
            vars(tensor).update(marks)


class _NoGradRegion:
    """Stands in for torch's guard of inference mode. The two can be told apart by errors only."""

    def __init__(self, mode: bool) -> None:
        self._mode = mode
        self._before = True

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not self._mode)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)
