"""The compiled forward of a stage's module, in the place of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from partita._torch.autograd.engine import forget_hooks, hooks_made
from partita._torch.autograd.region_switches import OpenRegions
from partita._torch.compile.eager_stance import compiles_what_it_is_given
from partita._torch.compile.refusal import (
    check_recurrent,
    check_wrappers,
    is_refusal,
    nothing_is_compiled,
    refusal_text,
)
from partita._torch.compile.region_nodes import trace_autocast_in_regions
from partita._torch.graph_module.lazy_module import LazyGraphModule, generate_code
from partita._torch.modules.contents import first_hook_inside, registries
from partita.errors import NotCompiled
from partita.pipelining.compiled.ahead import AheadOfStep, compiling_ahead
from partita.pipelining.compiled.artifacts import Artifacts, artifacts_for
from partita.pipelining.compiled.direct_calls import DirectCalls
from partita.pipelining.compiled.stateless import stateless
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.interface.two_modes import TwoModes
from partita.runtime.rng import sites_from

__all__ = ["CompiledForward"]


@dataclass(eq=False)
class _Entry:
    """A stage's function in one mode.

    Attributes:
        run: takes the state and the inputs.
        slots: where the state is looked up: a module's dict, and the name in it.
        inputs: the names of what the module is called with; None: whatever a call brings is handed over.
        first_site: the number of the stage's first random call.
        conditions: reads what the function takes between state and inputs; None where it takes nothing.
        repeated: positions of the state that is handed over once for each of its uses.
        repeated_inputs: of the inputs that are handed over so, between state and conditions.
        ran: whether it has been compiled.
    """

    run: Callable[..., Any]
    slots: tuple[tuple[Mapping[str, Any], str], ...]
    inputs: tuple[str, ...] | None
    first_site: int
    conditions: Callable[..., tuple[bool | None, ...]] | None = None
    repeated: tuple[int, ...] = ()
    repeated_inputs: tuple[int, ...] = ()
    ran: bool = False


class CompiledForward:
    """Called as the module's ``forward``; compiled when it is first called in a mode.

    Where the compiler refuses, it warns once and runs the module as it is from then on. A copy or pickle of
    the module has one of its own, which compiles anew.

    Args:
        module: whose ``forward`` it takes the place of.
        options: how it is compiled.
        where: what it is, for messages: ``stage 1``.
        shared: the names of parameters that other stages hold too, and of inputs that go on to later ones.
        hands_on: whether what it returns goes to other stages only.

    Attributes:
        own: the ``forward`` that was set on the module itself, in place of its class's; None: there is none.
        refused: why it runs uncompiled; empty where it does not.
        hooked: why it runs uncompiled in this step; likewise.
        compiled_ahead: for which kinds of steps it was compiled before they began; kept by the stage.
    """

    def __init__(
        self,
        module: nn.Module,
        options: CompileOptions,
        where: str,
        shared: Collection[str] = (),
        *,
        hands_on: bool = False,
    ) -> None:
        self._module = module
        before = vars(module).get("forward")
        self.own: Callable[..., Any] | None = before.own if isinstance(before, CompiledForward) else before
        self._is_graph = isinstance(module, (GraphModule, TwoModes)) and self.own is None
        self.options = options
        self.where = where
        self._shared = tuple(shared)
        self._hands_on = hands_on
        self.refused = self.hooked = ""
        self._reset()

    def _reset(self) -> None:
        self._artifacts: Artifacts = artifacts_for(self.options, hands_on=self._hands_on)
        self._entries: dict[tuple[bool, ...], _Entry] = {}
        self._flags: tuple[nn.Module, ...] | None = None
        self._computes = True
        self.compiled_ahead: set[Any] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_module": self._module,
            "own": self.own,
            "_is_graph": self._is_graph,
            "options": self.options,
            "where": self.where,
            "_shared": self._shared,
            "_hands_on": self._hands_on,
            "refused": "",
            "hooked": "",
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def begin(self) -> None:
        """Start a step. A compiler follows no hook of a submodule that is set later, and loses those of a
        backward pass; so with such hooks the step runs uncompiled.
        """
        if self._is_graph:
            return  # its submodules hold state, and are never called
        path = first_hook_inside(self._module)
        if path and not self.hooked:
            self._warn(f"its submodule {path!r} has a hook, which a compiler would lose")
        self.hooked = path

    def compile_ahead(
        self, step: AheadOfStep, early: Collection[nn.Parameter], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Compile what a step will run, and run nothing. Where that fails, the first call decides.

        Args:
            early: the parameters whose gradients I computes.
            args: like those that the step will bring; never read.
            kwargs: likewise.
        """
        if self.refused or self.hooked or nothing_is_compiled() or not compiles_what_it_is_given():
            return
        if not self._computes:  # where a compiler has seen such a call before, nothing would stop it
            return
        before = hooks_made()
        entry = self._entry()
        if entry.conditions is not None:  # they are read from the values
            return
        ids = {id(parameter) for parameter in early}
        numbers = (number for number, (table, name) in enumerate(entry.slots) if id(table[name]) in ids)
        step.early_state = frozenset(numbers)
        with compiling_ahead(step):
            self._first_run(entry, tuple(args), kwargs)
        self._computes = step.computes
        step.compile_backward()
        if self._is_graph:
            forget_hooks(before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.refused or self.hooked or nothing_is_compiled():
            return self._as_it_is(*args, **kwargs)
        before = hooks_made()
        try:
            entry = self._entry()
            result = self._run(entry, args, kwargs) if entry.ran else self._first_run(entry, args, kwargs)
            if self._is_graph:
                forget_hooks(before)  # tracers register some; code of a graph registers none
            return result
        except Exception as error:
            if not is_refusal(error):
                raise
            why = refusal_text(error)
        return self._given_up(why, args, kwargs)

    def _first_run(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        regions = OpenRegions.now()
        with warnings.catch_warnings():
            # Dynamo looks at the gradient of an input that the stage writes to
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            try:
                result = self._run(entry, args, kwargs)
            except BaseException:
                regions.put_back()  # a tracer that failed may have left some open
                raise
        entry.ran = True
        return result

    def _run(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if entry.inputs is not None and (kwargs or len(args) != len(entry.inputs)):
            args, kwargs = _in_order(entry.inputs, args, kwargs)
            if kwargs or len(args) != len(entry.inputs):
                return self._as_it_is(*args, **kwargs)  # Python says what is wrong with the call
        state = [table[name] for table, name in entry.slots]
        for place in entry.repeated:
            state[place] = state[place].view_as(state[place])
        state += [args[place].view_as(args[place]) for place in entry.repeated_inputs]
        if entry.conditions is not None:
            with torch.no_grad():
                state += entry.conditions(*state, *args)
        if not entry.first_site:
            return entry.run(*state, *args, **kwargs)
        with sites_from(entry.first_site):
            return entry.run(*state, *args, **kwargs)

    def _entry(self) -> _Entry:
        if self._flags is None:
            self._flags = tuple(_flagged(self._module))
        mode = tuple([module.training for module in self._flags])
        entry = self._entries.get(mode)
        if entry is None:
            entry = self._entries[mode] = self._new_entry()
        return entry

    def _new_entry(self) -> _Entry:
        module = self._module
        check_wrappers(module)
        graph = module.current if isinstance(module, TwoModes) else module
        if self.own is not None or not isinstance(graph, LazyGraphModule):
            return _Entry(self._compiled(self._as_it_is), (), None, 0)
        check_recurrent(graph)
        function = stateless(graph, module, self._shared)
        functions = self._artifacts.functions if self.options.shares else {}
        run = functions.get(function.hash)
        if run is None:
            generate_code(function.module)
            # Not the module itself: torch would call the hooks of all modules for it.
            run = functions[function.hash] = self._compiled(function.module.forward)
        slots = tuple(_slot(module, name) for name in function.state)
        inputs = tuple(str(node.target) for node in graph.graph.find_nodes(op="placeholder"))
        repeated = function.repeated, function.repeated_inputs
        return _Entry(DirectCalls(run), slots, inputs, function.first_site, function.conditions, *repeated)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        trace_autocast_in_regions()
        run: Callable[..., Any] = torch.compile(
            function, backend=self._artifacts.backend, fullgraph=True, dynamic=self.options.dynamic
        )
        return run

    @property
    def _as_it_is(self) -> Callable[..., Any]:
        if self.own is not None:
            return self.own
        forward: Callable[..., Any] = type(self._module).forward.__get__(self._module)
        return forward

    def _given_up(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as it is, from now on; only this once where that raises too, for then the call is at fault."""
        self.refused = why
        try:
            result = self._as_it_is(*args, **kwargs)
        except BaseException:
            self.refused = ""
            raise
        self._entries.clear()
        self._warn(why)
        return result

    def _warn(self, why: str) -> None:
        warnings.warn(
            f"{self.where} runs uncompiled, with the same results: {why}", NotCompiled, stacklevel=5
        )


def _flagged(module: nn.Module) -> list[nn.Module]:
    """The modules whose training flag decides what the module's graph does; itself first."""
    if not isinstance(module, GraphModule):
        return [module]
    names = dict.fromkeys(
        str(node.target).rpartition(".")[0]
        for node in module.graph.find_nodes(op="get_attr")
        if str(node.target).rpartition(".")[2] == "training"
    )
    return [module, *map(module.get_submodule, names)]


def _in_order(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, by position where no earlier one is missing."""
    rest = dict(kwargs)
    positional = [rest.pop(name) for name in takewhile(rest.__contains__, names[len(args) :])]
    return (*args, *positional), rest


def _slot(module: nn.Module, name: str) -> tuple[Mapping[str, Any], str]:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    own = islice(registries(owner), 2)  # of the module itself: parameters, buffers
    return next(table for table in (*own, vars(owner)) if leaf in table), leaf
