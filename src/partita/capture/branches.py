"""Models that branch on data: each way is traced, and one graph takes the right one in each run.

A model that asks ``if mask.all():`` is traced with one answer and with the other::

    trace(False)   the mask is expanded and used          merged   a graph that reads the condition, and
    trace(True)    no mask                                         does in each run what the model does

That is done where the condition follows from the model's inputs alone. Where it depends on what the model
computes (``if hidden.isinf().any():``), or there are too many ways, or two can't be merged, the graph holds
the way of the example, and a run in which the answer is another one is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from partita._torch.export.conditions import Answers, condition_nodes
from partita.capture.blame import summary
from partita.capture.merge_branches import Branch, merge_branches
from partita.capture.sizes import Sizes
from partita.errors import CaptureError
from partita.graph.conditions import ReadCondition, require_condition
from partita.graph.effects import analyse
from partita.graph.state import attribute

__all__ = ["MOST_WAYS", "Traced", "all_ways"]

MOST_WAYS = 8
"""So many ways through a model are traced at most."""


@dataclass(frozen=True)
class Traced:
    """One way through a model.

    Attributes:
        answers: what it was told; a node of the graph for each reads the condition.
    """

    module: GraphModule
    sizes: Sizes
    answers: Answers
    conditions: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conditions.extend(condition_nodes(self.module))
        for node, answer, place in zip(self.conditions, self.answers.given, self.answers.places, strict=True):
            node.target = ReadCondition(answer, place)


Heard = Mapping[str, Sequence[bool]]
Trace = Callable[[Answers], Traced]


def all_ways(
    trace: Trace, example: Callable[[], Heard | None], guess: Heard | None = None
) -> tuple[GraphModule, Sizes]:
    """Trace a model in all of its ways, and make one graph of them.

    Args:
        trace: with these answers; the model may ask for more, or for fewer.
        example: what the model hears, by the line that asks, when it runs with the example; None where it
            can't run.
        guess: what it is likely to hear; a wrong one costs a trace.

    Raises:
        Exception: whatever ``trace`` raises for the way of the example.
    """
    answers = Answers(example=dict(guess or {}))
    try:
        traced = trace(answers)
        failed = None
    except Exception as error:  # torch.export raises dozens of kinds
        if not answers.given:
            raise
        failed = error
    if failed is None and not answers.given:
        return traced.module, traced.sizes
    asks_data = failed is not None or len(answers.of_sizes) < len(answers.given)
    heard = example() if asks_data else answers.heard
    differs = heard is not None and heard != answers.heard
    if failed is not None and not differs:
        raise failed
    ways = _Ways(trace, heard or {})
    if differs and heard is not None:
        if failed is None:
            ways.spare.append(traced)
        traced = trace(Answers(example=heard))
    sizes = ways.serve_all_answers(traced, 0)
    return traced.module, sizes


class _Ways:
    """Goes through the tree of answers, depth first; each leaf is a trace."""

    def __init__(self, trace: Trace, heard: Heard) -> None:
        self._trace = trace
        self._heard = heard
        self._left = MOST_WAYS - 1
        self.spare: list[Traced] = []
        """Traces that are not used yet."""

    def serve_all_answers(self, traced: Traced, asked: int) -> Sizes:
        """Let the graph, in place, serve all answers from the question ``asked`` on; its sizes.

        Every later question is settled before: what the two ways share is then the same in both.
        """
        if asked == len(traced.answers.given):
            return traced.sizes
        sizes = self.serve_all_answers(traced, asked + 1)
        condition = traced.conditions[asked]
        answer = traced.answers.given[asked]
        reason = self._reason_against(traced, asked)
        if not reason:
            self._left -= 1
            try:
                other = self._way([*traced.answers.given[:asked], not answer])
                if len(other.conditions) <= asked:
                    raise CaptureError("the model asks elsewhere when it is traced again")
                other_sizes = self.serve_all_answers(other, asked + 1)
                return merge_branches(
                    Branch(traced.module, sizes, condition, answer),
                    Branch(other.module, other_sizes, other.conditions[asked], not answer),
                )
            except Exception as error:  # torch.export raises dozens of kinds
                reason = summary(error)
        with traced.module.graph.inserting_after(condition):
            traced.module.graph.call_function(
                require_condition, (condition, answer, traced.answers.places[asked], reason)
            )
        traced.module.recompile()
        return sizes

    def _way(self, planned: list[bool]) -> Traced:
        """A trace that begins with these answers."""
        for number, traced in enumerate(self.spare):
            if traced.answers.given[: len(planned)] == planned:
                return self.spare.pop(number)
        return self._trace(Answers(planned, self._heard))

    def _reason_against(self, traced: Traced, asked: int) -> str:
        """Why the other way is not traced; empty where it is."""
        if asked in traced.answers.of_sizes:
            return "the answer depends on sizes only, and is another one for these"
        if not _follows_from_inputs(traced.module, traced.conditions[asked]):
            return "the answer depends on what the model computes"
        if not self._left:
            return f"the model has more than {MOST_WAYS} ways"
        return ""


def _follows_from_inputs(module: GraphModule, condition: Node) -> bool:
    """Whether no parameter or buffer of the model, and no random number, has a part in a node's value."""
    effects = analyse(module)
    random = {effects.nodes[position] for position in effects.random}
    waiting, seen = [condition], {condition}
    while waiting:
        node = waiting.pop()
        if node in random or (
            node.op == "get_attr" and attribute(module, node).kind in ("parameter", "buffer")
        ):
            return False
        fresh = [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(fresh)
        waiting += fresh
    return True
