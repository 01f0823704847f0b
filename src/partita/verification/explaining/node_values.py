"""Running a graph node by node, with a copy of each node's value and of its gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from partita.errors import ArgumentTypeError
from partita.verification.observing.randomness import torch_states
from partita.verification.observing.subject import PieceLike, SplitLike, Subject, is_pipe
from partita.verification.tree import tensors

__all__ = ["SILENT_OPS", "NodeValues", "Pieces", "recording"]

_Value = dict[str, torch.Tensor]
SILENT_OPS = ("placeholder", "get_attr", "output")


@dataclass
class NodeValues:
    """Recordings of one run, by the name of the node.

    Attributes:
        values: the tensors of a node's value, detached copies that keep ``requires_grad``.
        gradients: the gradients of these tensors.
        draws: the states of torch's generators that a node changed, after it.
        piece_of: the piece in which each node ran.
    """

    values: dict[str, _Value] = field(default_factory=dict)
    gradients: dict[str, _Value] = field(default_factory=dict)
    draws: dict[str, _Value] = field(default_factory=dict)
    piece_of: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Pieces:
    """The pieces among the submodules of the graph that runs.

    Attributes:
        entered: those that run node by node, with the nodes of the whole in each; None: all of its nodes.
        called: those that run as they are, compiled, and of which only what they return is recorded.
        ordered: all of them, where the candidate lists them.
    """

    entered: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    called: Mapping[str, PieceLike] = field(default_factory=dict)
    ordered: tuple[PieceLike, ...] = ()

    @classmethod
    def of(cls, candidate: Any, whole: set[str]) -> Pieces:
        """Those of a candidate.

        Args:
            whole: the nodes of the reference.
        """
        if isinstance(candidate, SplitLike) or is_pipe(candidate):
            called = {piece.name: piece for piece in candidate.pieces if "forward" in vars(piece.module)}
            entered = {
                piece.name: frozenset(piece.node_names)
                for piece in candidate.pieces
                if piece.name not in called
            }
            return cls(entered, called, candidate.pieces)
        calls = [n for n in candidate.graph.nodes if n.op == "call_module" and n.name not in whole]
        named = {str(call.target): candidate.get_submodule(str(call.target)) for call in calls}
        return cls({name: None for name, module in named.items() if isinstance(module, GraphModule)})


def recording(notes: NodeValues, pieces: Pieces) -> Callable[[Subject], Callable[..., Any]]:
    """An ``instrument`` for `observe` that runs a copied graph module node by node."""

    def instrument(subject: Subject) -> Callable[..., Any]:
        call = subject.call
        if is_pipe(call):  # it binds the arguments, and runs its graph in a way of its own
            stitched = call.split_gm
            stitched.forward = _Recorder(stitched, notes, pieces).run_bound
            return subject.call
        if not isinstance(call, GraphModule):
            raise ArgumentTypeError(f"a {type(call).__name__} has no nodes to run one by one")
        return _Recorder(call, notes, pieces).run_bound

    return instrument


class _Recorder(torch.fx.Interpreter):
    """Runs a graph, and the pieces that it calls, and records the value of each node."""

    def __init__(
        self, module: GraphModule, notes: NodeValues, pieces: Pieces, piece: str | None = None
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._notes = notes
        self._pieces = pieces
        self._piece = piece
        self._forward = module.forward

    def run_bound(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the arguments of a call of the module."""
        bound = inspect.signature(self._forward).bind(*args, **kwargs)
        bound.apply_defaults()
        flat: list[Any] = []
        for name, value in bound.arguments.items():
            many = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            flat.extend(value) if many else flat.append(value)
        return self.run(*flat)

    def run_node(self, n: torch.fx.Node) -> Any:
        before = torch_states()
        result = super().run_node(n)
        if n.op in SILENT_OPS or not self._is_of_the_whole(n):
            return result
        self._notes.piece_of[n.name] = self._piece
        changed = {key: state for key, state in torch_states().items() if not state.equal(before[key])}
        if changed:
            self._notes.draws[n.name] = changed
        self._note(n.name, result)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._piece is not None:
            return super().call_module(target, args, kwargs)
        if target in self._pieces.called:
            result = super().call_module(target, args, kwargs)
            names = self._pieces.called[target].outputs
            for name, value in zip(names, (result,) if len(names) == 1 else result, strict=True):
                self._notes.piece_of[name] = target
                self._note(name, value)
            return result
        if target not in self._pieces.entered:
            return super().call_module(target, args, kwargs)
        inner = self.fetch_attr(target)
        return _Recorder(inner, self._notes, self._pieces, target).run_bound(*args, **kwargs)

    def _is_of_the_whole(self, node: torch.fx.Node) -> bool:
        """Whether a node comes from the whole graph: the stitched graph has others, also of the same name."""
        if self._piece is None:
            stitched = bool(self._pieces.entered or self._pieces.called)
            return not stitched or (node.op != "call_module" and node.name not in self._notes.piece_of)
        wanted = self._pieces.entered[self._piece]
        return wanted is None or node.name in wanted

    def _note(self, name: str, result: Any) -> None:
        values = self._notes.values.setdefault(name, {})
        for path, tensor in tensors(result, ""):
            copied = tensor.detach().clone()
            values[path] = copied.requires_grad_() if tensor.requires_grad else copied
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._catch(name, path))

    def _catch(self, name: str, path: str) -> Callable[[torch.Tensor], None]:
        gradients = self._notes.gradients.setdefault(name, {})

        def catch(gradient: torch.Tensor) -> None:
            gradients[path] = gradient.detach().clone()

        return catch
