"""Graph modules whose code is generated on the first run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen

from partita._torch.autograd.region_switches import (
    ENTER_AUTOCAST,
    ENTER_CACHE_SCOPE,
    ENTER_INFERENCE,
    SET_GRAD,
    OpenRegions,
    leave_open,
)
from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.graph_pickle import GraphRecord
from partita._torch.graph_module.guards_module import recorded, restored
from partita._torch.graph_module.quick_code import quick_forward

__all__ = ["LazyGraphModule", "generate_code", "lazy_module", "mark_impure", "run_by", "use_flat_signature"]

_SWITCHES = {SET_GRAD, ENTER_AUTOCAST, ENTER_INFERENCE, ENTER_CACHE_SCOPE}


class _NamedParameters:
    """``nn.Module.named_parameters``: what Dynamo reads of most modules before it traces their code. (A
    property would take the class' method away, and let no instance have its own.)
    """

    def __get__(self, module: LazyGraphModule | None, kind: type[nn.Module]) -> Any:
        if module is None:
            return nn.Module.named_parameters
        if not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None:
            generate_code(module)
        return super(LazyGraphModule, module).named_parameters


class LazyGraphModule(_LazyGraphModule):
    """A ``GraphModule`` that costs next to nothing until it is run, printed, pickled or compiled.

    The first run uses code that graphs of equal structure share (see ``quick_code``). Everything that looks
    at the code (``.code``, ``torch.compile``, symbolic tracing) gets what torch generates. Copies and pickles
    keep the graph itself, buffers that are not persistent, and whether the module counts as impure. A call
    that ends with an error leaves no grad, autocast or inference region open that the graph has entered.
    """

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        if torch.compiler.is_dynamo_compiling():
            # of the module's caller, which has not asked for its parameters, as where FSDP manages it
            from torch._dynamo.comptime import comptime  # half a second, for who compiles

            comptime(_generate_code_and_restart)
        elif cls.forward is cls._lazy_forward:
            self._quick_compile()
        return self.forward(*args, **kwargs)

    forward = _lazy_forward
    _partita_quick: Callable[..., Any] | None = None
    _partita_regions: bool | None = None

    def _quick_compile(self) -> None:
        cls = type(self)
        quick = quick_forward(self._graph, cls.__name__)
        if quick is None:
            self.real_recompile()
        else:
            cls._partita_quick = cls.forward = quick
            cls._partita_regions = _has_regions(self._graph)

    def _real_recompile(self) -> Any:
        code = super()._real_recompile()
        type(self)._partita_regions = _has_regions(self._graph)
        return code

    @classmethod
    def recompile(cls) -> None:  # type: ignore[override]  # as the class above it
        """Drop the code after a change of the graph; it is generated anew at the next run."""
        cls._partita_regions = None
        super().recompile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `is_compiling` is true while another thread compiles, too
        if not torch.compiler.is_dynamo_compiling() and get_eval_frame_callback():
            _generate_code_for_dynamo(self)
        if self._partita_regions is False or torch.compiler.is_dynamo_compiling() or not _opens_regions(self):
            return super().__call__(*args, **kwargs)
        before = OpenRegions.now()
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            leave_open(before, error, type(self).forward.__code__)
            raise

    named_parameters: Any = _NamedParameters()

    @classmethod
    def _needs_recompile(cls) -> bool:
        """Whether torch's own code is still to be generated."""
        return cls.forward is cls._lazy_forward or cls.forward is cls._partita_quick

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, as ``nn.Module.compile`` does."""
        self.real_recompile()
        super().compile(*args, **kwargs)

    def __reduce__(self) -> Any:
        state = {
            key: value for key, value in vars(self).items() if key not in ("_graph", "_in_spec", "_out_spec")
        }
        state["_modules"] = recorded(self._modules)
        return _rebuilt, (type(self).__name__, state, GraphRecord.of(self._graph))

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyGraphModule:
        result = lazy_module(Graph(), type(self).__name__, training=self.training)
        memo[id(self)] = result
        for spec in ("_in_spec", "_out_spec"):  # they never change
            if spec in vars(self):
                memo[id(vars(self)[spec])] = vars(self)[spec]
        vars(result).update(
            copy.deepcopy({key: value for key, value in vars(self).items() if key != "_graph"}, memo)
        )
        result.graph = copy_graph(self._graph)
        if not self._needs_recompile():  # one code for all copies, until their graphs are changed
            type(result).forward = type(self).forward
        for hook in self._deepcopy_hooks:
            hook(result)
        return result


# All graphs share this frame: Dynamo compiles not the frame, but what it calls, a graph's own code.
set_code_exec_strategy(
    LazyGraphModule.__call__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
)


def lazy_module(graph: Graph, name: str, *, training: bool) -> LazyGraphModule:
    """Return a module around ``graph`` without parameters, buffers and children, which the caller sets."""
    module = LazyGraphModule.__new__(LazyGraphModule)
    # as nn.Module and GraphModule initialise themselves, in a tenth of the time
    vars(module).update({key: _fresh(value) for key, value in vars(_PROTOTYPE).items()})
    vars(module).update(training=training, _tracer_cls=graph._tracer_cls, _graph=graph)
    type(module).__name__ = name
    graph.owning_module = module
    return module


def generate_code(module: nn.Module) -> None:
    """Generate the code of ``module`` now, so that its copies share it, and so that its ``forward`` is it."""
    if isinstance(module, _LazyGraphModule):
        module.real_recompile()


def run_by(
    module: LazyGraphModule,
    runner: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Run the graph of ``module`` with the attributes of ``runner``, another module."""
    cls = type(module)
    if cls.forward is cls._lazy_forward:
        module._quick_compile()
    forward = cls.forward
    if module._partita_regions is False or torch.compiler.is_dynamo_compiling() or not _opens_regions(module):
        return forward(runner, *args, **kwargs)
    before = OpenRegions.now()
    try:
        return forward(runner, *args, **kwargs)
    except BaseException as error:
        leave_open(before, error, forward.__code__)
        raise


def use_flat_signature(graph: Graph) -> None:
    """Change a graph, in place, so that it takes one argument a placeholder and returns its outputs flat."""
    graph._codegen = CodeGen()


def mark_impure(module: GraphModule) -> None:
    """Let dead-code elimination keep every call of ``module``, though nobody uses its result."""
    module._is_impure = True  # type: ignore[assignment]


def _opens_regions(module: LazyGraphModule) -> bool:
    """Whether a graph enters regions. Asked also where its own code never runs: of a compiled stage."""
    cls = type(module)
    if cls._partita_regions is None:
        cls._partita_regions = _has_regions(module._graph)
    return cls._partita_regions


def _generate_code_for_dynamo(module: LazyGraphModule) -> None:
    """Generate the code that Dynamo is about to compile: the quick one belongs to other modules, too."""
    if module._needs_recompile():
        for child in module.modules():
            generate_code(child)


def _generate_code_and_restart(context: Any) -> None:
    """Generate the code of a module whose lazy ``forward`` Dynamo is tracing, and let it begin anew.

    That of all modules of its callers too, else Dynamo would begin anew for each.
    """
    from torch._dynamo.exc import UnspecializeRestartAnalysis  # the one that may then go another way
    from torch._dynamo.variables import UnspecializedNNModuleVariable

    frame = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    if not frame.symbolic_locals["self"].unwrap().value._needs_recompile():
        return
    while frame is not None:
        for variable in frame.symbolic_locals.values():
            if isinstance(variable.unwrap(), UnspecializedNNModuleVariable):
                for module in variable.unwrap().value.modules():
                    generate_code(module)
        frame = frame.parent
    raise UnspecializeRestartAnalysis(restart_reason="the code of a graph module was generated")


# called around a graph that Dynamo compiles, and no part of it
for _outside in (_opens_regions, _generate_code_for_dynamo):
    set_code_exec_strategy(_outside.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def _has_regions(graph: Graph) -> bool:
    return any(node.target in _SWITCHES for node in graph.nodes)


def _fresh(value: Any) -> Any:
    """Return an empty container for an empty container, and any other value as it is."""
    return type(value)() if isinstance(value, (dict, list, set)) else value


def _rebuilt(name: str, state: dict[str, Any], record: GraphRecord) -> LazyGraphModule:
    module = lazy_module(Graph(), name, training=True)
    vars(module).update(state, _modules=restored(state["_modules"]))
    module.graph = record.build()
    info = getattr(module._graph._codegen, "pytree_info", None)
    if info is not None and module._forward_pre_hooks:
        # a check of the inputs may read it before the first run sets it
        vars(module)["_in_spec"] = info.in_spec
    return module


_PROTOTYPE = GraphModule({}, Graph())
del _PROTOTYPE.__dict__["_graph"]
