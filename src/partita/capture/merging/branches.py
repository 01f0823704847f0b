"""Models that branch on data: each branch is traced, and all are merged into one graph.

Terms:
    question: a line of the model that needs a tensor's truth, such as ``if mask.all():``.
    answers: the truths that a trace assumes, one for each question, in order.
    way: what the model does for one sequence of answers. Each way is one trace::

        trace(False)   the mask is expanded and used       merged   a graph that reads the condition and
        trace(True)    no mask                                      does in each run what the model does

Both branches are traced, also where the condition depends on what the model computes (``if
hidden.isinf().any():``) and there are few such questions. Where it depends on what the model keeps from call
to call or draws, or there are too many ways, or two can't be merged, the graph has the branch of the example
only, and raises an error in a run with another answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from partita._torch.export.conditions import Answers, condition_nodes
from partita.capture.merging.merge_branches import Branch, merge_branches
from partita.capture.merging.size_order import order_sizes
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.tracing.blame import summary
from partita.errors import CaptureError
from partita.graph.attributes import attribute
from partita.graph.effect_rules.conditions import ReadCondition, require_condition
from partita.graph.effects import analyse
from partita.listing import listed

__all__ = ["MOST_WAYS", "Traced", "all_ways", "has_answers_of_the_example"]

MOST_WAYS = 8
"""At most so many ways through a model are traced."""

_OF_SIZES = "the answer depends on sizes only, and is another one for these"


@dataclass(frozen=True)
class Traced:
    """One way through a model.

    Attributes:
        answers: the assumed answers.
        conditions: for each answer the node of the graph that reads the condition.
    """

    module: GraphModule
    sizes: Sizes
    answers: Answers
    conditions: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        order_sizes(self.module)
        self.conditions.extend(condition_nodes(self.module))
        for node, answer, place in zip(
            self.conditions, self.answers.in_order, self.answers.places, strict=True
        ):
            node.target = ReadCondition(answer, place)


KnownAnswers = Mapping[str, Sequence[bool]]
"""The answers that a run of the model got, by the line that asks."""

Trace = Callable[[Answers], Traced]


def all_ways(
    trace: Trace, example: Callable[[], KnownAnswers | None], guess: KnownAnswers | None = None
) -> tuple[GraphModule, Sizes]:
    """Trace all ways through a model, and merge them into one graph.

    Args:
        trace: traces the model with these answers; it may ask more or fewer questions.
        example: returns the answers that the model gets when it runs on the example; None where it can't run.
        guess: the answers that it is likely to get; a wrong guess costs one trace.

    Raises:
        Exception: whatever ``trace`` raises for the way of the example.
    """
    # Trace once, with the guess; most models ask nothing.
    answers = Answers(example=dict(guess or {}))
    try:
        traced = trace(answers)
        failed = None
    except Exception as error:  # torch.export raises dozens of kinds
        if not answers.in_order:
            raise
        failed = error
    if failed is None and not answers.in_order:
        return traced.module, traced.sizes
    # Compare the guess with the answers of a real run, and trace again where they differ.
    asks_data = failed is not None or len(answers.of_sizes) < len(answers.in_order)
    known_answers = example() if asks_data else answers.by_place
    differs = known_answers is not None and answers.differ_from(known_answers)
    if failed is not None and not differs:
        raise failed
    ways = _Ways(trace, known_answers or {})
    if differs and known_answers is not None:
        if failed is None:
            ways.spare.append(traced)
        traced = trace(Answers(example=known_answers))
    # Merge the other ways into this one.
    sizes = ways.serve_all_answers(traced, 0)
    return traced.module, sizes


def has_answers_of_the_example(module: GraphModule) -> bool:
    """Whether a graph has the branch of the example only, of a question about its data."""
    checks = module.graph.find_nodes(op="call_function", target=require_condition)
    return any(node.args[3] != _OF_SIZES for node in checks)


class _Ways:
    """Visits the tree of answers, depth first; each leaf is a trace.

    Attributes:
        spare: traces that are not used yet.
    """

    def __init__(self, trace: Trace, known_answers: KnownAnswers) -> None:
        self._trace = trace
        self._known_answers = known_answers
        self._left = MOST_WAYS - 1
        self.spare: list[Traced] = []

    def serve_all_answers(self, traced: Traced, asked: int) -> Sizes:
        """Extend a graph, in place, to all answers from question number ``asked`` on; return its sizes.

        Later questions are merged first, so that what the two branches share is the same in both.
        """
        if asked == len(traced.answers.in_order):
            return traced.sizes
        sizes = self.serve_all_answers(traced, asked + 1)
        condition = traced.conditions[asked]
        answer = traced.answers.in_order[asked]
        reason = self._reason_against(traced, asked)
        if not reason:
            self._left -= 1
            try:
                other = self._way([*traced.answers.in_order[:asked], not answer])
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
            if traced.answers.in_order[: len(planned)] == planned:
                return self.spare.pop(number)
        return self._trace(Answers(planned, self._known_answers))

    def _reason_against(self, traced: Traced, asked: int) -> str:
        """Why the other branch is not traced; empty where it is."""
        if asked in traced.answers.of_sizes:
            return _OF_SIZES
        state = _state_behind(traced.module, traced.conditions[asked])
        if state and all(kind == "buffer" for kind in state.values()):
            return (
                f"the answer depends on what the model keeps from call to call ({listed(state)}). Where it "
                "differs in the first call only, call the model once before the cut, in training on data of "
                "training"
            )
        # Models ask in each layer whether something has overflowed, and it never has: not worth many traces.
        if state == {} or (state and 2 ** len(traced.answers.in_order) > MOST_WAYS):
            return "the answer depends on what the model computes"
        if not self._left:
            return f"the model has more than {MOST_WAYS} ways"
        return ""


def _state_behind(module: GraphModule, condition: Node) -> dict[str, str] | None:
    """The parameters and buffers that a node's value depends on, with their kinds: empty where it depends on
    random numbers; None where it follows from the model's inputs alone.
    """
    effects = analyse(module)
    random = {effects.nodes[position] for position in effects.random}
    state: dict[str, str] = {}
    waiting, seen = [condition], {condition}
    while waiting:
        node = waiting.pop()
        if node in random:
            return {}
        if node.op == "get_attr" and attribute(module, node).kind in ("parameter", "buffer"):
            state[str(node.target)] = attribute(module, node).kind
        fresh = [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(fresh)
        waiting += fresh
    return state or None
