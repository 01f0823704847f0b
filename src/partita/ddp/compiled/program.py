"""Runs the pieces of a cut backward graph, and hands out each gradient as soon as its piece has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from partita._torch.compile.aot import Boxed
from partita.splitter import Piece, Split

__all__ = ["BackwardProgram", "Deliver", "ProgramStep", "program_of"]

Deliver: TypeAlias = Callable[[int, Any], Any]
"""Given an output position and its value; returns what to put there."""


@dataclass(frozen=True)
class ProgramStep:
    """One piece.

    Attributes:
        run: takes the values of ``inputs``.
        inputs: names of values.
        outputs: names of what it returns.
        gradients: output positions that are known when it has run, with the names of their values, in the
            order in which they were computed.
        spent: of its inputs, those that nobody needs any more.
        delivered: of its gradients, those that no later step needs.
    """

    run: Boxed
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[tuple[int, str], ...]
    spent: tuple[str, ...]
    delivered: tuple[str, ...]


@dataclass(frozen=True)
class BackwardProgram:
    """A backward graph in steps.

    Attributes:
        inputs: names of its inputs.
        constants: its outputs, with None where a step computes one.
        early: outputs that are inputs, with their names.
        steps: in order.
    """

    inputs: tuple[str, ...]
    constants: tuple[Any, ...]
    early: tuple[tuple[int, str], ...]
    steps: tuple[ProgramStep, ...]

    def run(self, values: list[Any], deliver: Deliver) -> list[Any]:
        """All outputs, in order.

        Args:
            values: the inputs; the list is emptied.
            deliver: is given every output that is no constant, as soon as it is there.
        """
        computed = dict(zip(self.inputs, values, strict=True))
        values.clear()
        results = list(self.constants)
        for position, name in self.early:
            results[position] = deliver(position, computed[name])
        for step in self.steps:
            taken = [computed[name] for name in step.inputs]
            for name in step.spent:
                del computed[name]
            computed.update(zip(step.outputs, step.run(taken), strict=True))
            for position, name in step.gradients:
                results[position] = deliver(position, computed[name])
            for name in step.delivered:
                del computed[name]
        return results


def program_of(
    gm: GraphModule, cut: Split | None, compile_piece: Callable[[str, GraphModule], Boxed]
) -> BackwardProgram:
    """The program of a backward graph.

    Args:
        cut: ``gm`` in pieces; None to run it as a whole.
        compile_piece: from a key that is equal for equal pieces, and a piece, to what runs it.
    """
    nodes = list(gm.graph.nodes)
    place = {node.name: number for number, node in enumerate(nodes)}
    (outputs,) = gm.graph.output_node().args
    wanted: dict[str, list[int]] = {}
    for position, value in enumerate(outputs):  # type: ignore[arg-type]
        if isinstance(value, Node):
            wanted.setdefault(value.name, []).append(position)
    constants = tuple(None if isinstance(value, Node) else value for value in outputs)  # type: ignore[union-attr]
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    early = tuple((position, name) for name in inputs for position in wanted.get(name, ()))
    if cut is None:
        names = tuple(sorted((name for name in wanted if name not in set(inputs)), key=place.__getitem__))
        shown = [_Shown(inputs, names, _whole(gm, names, compile_piece))]
    else:
        shown = [_Shown(piece.inputs, piece.outputs, _compiled(piece, compile_piece)) for piece in cut.pieces]
    return BackwardProgram(inputs, constants, early, _steps(shown, wanted, place))


@dataclass(frozen=True)
class _Shown:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Boxed


def _compiled(piece: Piece, compile_piece: Callable[[str, GraphModule], Boxed]) -> Boxed:
    return compile_piece(piece.structural_hash, piece.module)


def _whole(
    gm: GraphModule, names: Sequence[str], compile_piece: Callable[[str, GraphModule], Boxed]
) -> Boxed:
    """The uncut graph, whose outputs include None and inputs; only those called ``names`` are taken."""
    (outputs,) = gm.graph.output_node().args
    first: dict[str, int] = {}
    for position, value in enumerate(outputs):  # type: ignore[arg-type]
        if isinstance(value, Node):
            first.setdefault(value.name, position)
    positions = [first[name] for name in names]
    run = compile_piece("", gm)

    def selected(values: list[Any]) -> Sequence[Any]:
        results = run(values)
        return [results[position] for position in positions]

    return selected


def _steps(
    shown: Sequence[_Shown], wanted: dict[str, list[int]], place: dict[str, int]
) -> tuple[ProgramStep, ...]:
    last_use: dict[str, int] = {}
    for number, piece in enumerate(shown):
        last_use.update(dict.fromkeys(piece.inputs, number))
    steps = []
    for number, piece in enumerate(shown):
        produced = sorted((name for name in piece.outputs if name in wanted), key=place.__getitem__)
        steps.append(
            ProgramStep(
                run=piece.run,
                inputs=piece.inputs,
                outputs=piece.outputs,
                gradients=tuple((position, name) for name in produced for position in wanted[name]),
                spent=tuple(name for name in piece.inputs if last_use[name] == number),
                delivered=tuple(name for name in produced if last_use.get(name, -1) <= number),
            )
        )
    return tuple(steps)
