"""Where a model branches on data while it is traced, and which way it was sent.

``if mask.all():`` asks a tensor for its truth, which a trace does not have, and export refuses the model.
Here the trace is given an answer, and the graph keeps the tensor that was asked::

    model      if mask.all():                    graph    condition = all(mask)
                   mask = None                            read_condition(condition)      answers: [True]

Whoever traces decides what is done with it: trace again with the other answer, or check it in each run. A
question about nothing but constants and sizes (are the positions, an ``arange``, consecutive?) is answered by
computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect, map_arg
from torch.overrides import TorchFunctionMode

from partita._torch.export.constant_nodes import (
    draws_random_numbers,
    from_constants,
    is_whole_slice,
    is_written,
)
from partita._torch.export.users_code import asking_line
from partita.errors import CaptureError

__all__ = ["MOST_ASSUMED", "Answers", "answered", "answers_given", "condition_nodes"]

MOST_ASSUMED = 100
"""At most so many answers in a row are assumed for one line: ``while not close:`` would be asked for ever."""


@dataclass
class Answers:
    """The answers that a model gets, while it is traced or run, when it asks for the truth of a tensor.

    Attributes:
        planned: the answers to its first questions.
        example: for the others, by the line that asks: what it heard there when it ran with the example, each
            time.
        in_order: all answers.
        places: the line of the model that asked, for each.
        of_sizes: which of them follow from the sizes of the inputs, and are the same for others.
        by_place: by the line that asks, the answer of each time, repeated questions too.
    """

    planned: Sequence[bool] = ()
    example: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    in_order: list[bool] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    of_sizes: set[int] = field(default_factory=set)
    by_place: dict[str, list[bool]] = field(default_factory=dict)

    def answer(self, place: str, of_sizes: bool | None = None) -> bool:
        """Return the next answer: as planned, after that as in the example; False where that did not ask.

        Args:
            of_sizes: the answer where it follows from the sizes of the inputs, which then counts more than
                the example; None elsewhere.

        Raises:
            CaptureError: the line has asked too often: a loop that ends on data does not end on this answer.
        """
        number = len(self.in_order)
        expected, time = self.example.get(place, ()), len(self.by_place.get(place, ()))
        if of_sizes is None and time >= len(expected) + MOST_ASSUMED and number >= len(self.planned):
            raise CaptureError(
                f"the loop around {place} goes on for more than {MOST_ASSUMED} rounds where the answer is "
                "False each time, and there may be no end to it"
            )
        answer = expected[time] if time < len(expected) else False
        if of_sizes is not None:
            answer = of_sizes
            self.of_sizes.add(number)
        self.note(self.planned[number] if number < len(self.planned) else answer, place)
        return self.in_order[-1]

    def repeated(self, answer: bool, place: str) -> None:
        """Record that a line asks what has been answered before."""
        self.by_place.setdefault(place, []).append(answer)

    def note(self, answer: bool, place: str) -> None:
        """Record a new answer."""
        self.in_order.append(answer)
        self.places.append(place)
        self.repeated(answer, place)

    def differ_from(self, example: Mapping[str, Sequence[bool]]) -> bool:
        """Whether a line that asked would have got another answer, had it got what it hears in an example.

        A line that the example asks and nobody asked here changes nothing.
        """
        for place, answers in self.by_place.items():
            expected = list(example.get(place, ()))[: len(answers)]
            if answers != expected + [False] * (len(answers) - len(expected)):
                return True
        return False

    def forget(self) -> None:
        """Remove all answers."""
        self.in_order.clear()
        self.places.clear()
        self.of_sizes.clear()
        self.by_place.clear()


class _ReadCondition(HigherOrderOperator):
    """Stands in a traced graph where a condition was read: exported programs hold operators only."""

    def __init__(self) -> None:
        super().__init__("partita_read_condition")

    def __call__(self, condition: Any) -> Any:
        return super().__call__(condition)


_read = _ReadCondition()
has_side_effect(_read)
_TRUTH = torch.Tensor.__bool__
_NUMBER = torch.Tensor.item


class _Asked(TorchFunctionMode):
    """Calls ``ask`` with every tensor whose truth is asked for; None lets torch answer."""

    def __init__(self, ask: Callable[[torch.Tensor], bool | None]) -> None:
        super().__init__()
        self._ask = ask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _TRUTH or (func is _NUMBER and args[0].dtype == torch.bool):
            answer = self._ask(args[0])
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))


@contextmanager
def answered(answers: Answers) -> Iterator[None]:
    """While ``torch.export`` traces (not in strict mode), answer the model's questions and record them."""

    by_question: dict[Hashable, bool] = {}

    def ask(tensor: torch.Tensor) -> bool | None:
        mode = get_proxy_mode()
        if mode is None or not isinstance(tensor, FakeTensor) or tensor.numel() != 1:
            return None
        place = asking_line()
        tracer: Any = mode.tracer
        proxy = tracer.unwrap_proxy(tensor)
        if place is None or not isinstance(proxy, Proxy):
            return None  # torch's own question, or a constant's
        question = _question(proxy.node)
        if question in by_question:
            answers.repeated(by_question[question], place)
        else:
            by_question[question] = answers.answer(place, from_constants(proxy.node))
            tracer.create_proxy("call_function", _read, (proxy,), {}, name="condition")
        return by_question[question]

    with _Asked(ask):
        yield


@contextmanager
def answers_given(answers: Answers) -> Iterator[None]:
    """While a model runs, record the truth of each tensor that it asks for."""

    def ask(tensor: torch.Tensor) -> bool | None:
        place = asking_line()
        if place is None or tensor.numel() != 1:
            return None
        with torch._C.DisableTorchFunction():
            answer = bool(tensor)
        answers.note(answer, place)
        return answer

    with _Asked(ask):
        yield


def _question(node: Node) -> Hashable:
    """Return what is the same for two nodes that are sure to have the same value."""
    hashes: dict[Node, int] = {}
    expression = _expression(node, hashes)
    return node if is_written(hashes) else expression


def _expression(node: Node, hashes: dict[Node, int]) -> int:
    """Return a hash of how a node's value is computed from inputs, equal for two that are computed alike. Two
    draws of random numbers are never alike.
    """
    if node not in hashes:
        operands = [_expression(operand, hashes) for operand in node.all_input_nodes]
        text = repr(map_arg((node.args, node.kwargs), lambda _: None))
        named = node.op in ("placeholder", "get_attr") or draws_random_numbers(node)
        name = node.name if named else ""
        own = hash((node.op, node.target, name, text, *operands))
        hashes[node] = operands[0] if is_whole_slice(node) else own
    return hashes[node]


def condition_nodes(gm: GraphModule) -> list[Node]:
    """The nodes of a traced graph that read conditions, in order; each has the tensor as its argument."""
    return list(gm.graph.find_nodes(op="call_function", target=_read, sort=True))
