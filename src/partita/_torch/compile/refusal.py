"""What ``torch.compile`` raises where it can't compile a function, and why."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule

from partita._torch.tensors.subclasses import innermost_tensors

__all__ = [
    "changed_by_tracing",
    "check_compiles_nothing",
    "check_margin_losses",
    "check_recurrent",
    "check_wrappers",
    "failure_text",
    "is_refusal",
    "nothing_is_compiled",
    "refusal_text",
]

_RECURRENT = frozenset(("aten::gru", "aten::lstm", "aten::rnn_relu", "aten::rnn_tanh"))
_MARGIN_LOSSES = ("multi_margin_loss", "multilabel_margin_loss")
_TOO_OFTEN = (
    "it was compiled for so many sizes, modes or branches that torch compiles it for no other "
    "(torch._dynamo.config.recompile_limit is {limit}): raise the limit, or compile sizes as symbols "
    "(dynamic=True)"
)
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]+)')


class Uncompilable(Exception):
    """A stage has something that is left as it is."""


def nothing_is_compiled() -> bool:
    """Whether Dynamo leaves functions as they are: a mode watches operators in this thread, or
    ``torch._dynamo.config.disable`` (``TORCH_COMPILE_DISABLE=1``) turns it off.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or torch._dynamo.config.disable


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that a function could not be compiled. Nothing of it has run then."""
    refusals = (TorchDynamoException, FailOnRecompileLimitHit, Uncompilable)
    return isinstance(error, refusals) or _is_left_in_region(error)


def _is_left_in_region(error: BaseException) -> bool:
    """Whether Dynamo has failed within a region of autocast, and not left it (torch 2.11 traces none that are
    entered by a call).
    """
    return isinstance(error, AssertionError) and "changed while dynamo tracing" in str(error)


def check_compiles_nothing(func: object, args: tuple[object, ...]) -> None:
    """Check that ``func`` is no operator (``torch.cond``, ``scan``, ``flex_attention``) that is
    called with functions: it compiles them, and is not right, or raises, where it can not.

    Raises:
        Uncompilable: it is one.
    """
    if isinstance(func, HigherOrderOperator) and any(
        callable(arg) and not isinstance(arg, (nn.Module, type, torch.Tensor)) for arg in args
    ):
        raise Uncompilable(f"{func.name()} compiles the functions that it is called with")


def check_recurrent(gm: GraphModule) -> None:
    """Check that a graph, with those in it, has no recurrent layer: Dynamo, which leaves the modules as they
    are, does not see that an operator is one.

    Raises:
        Uncompilable: names the operator. Not where torch is set to compile them.
    """
    if torch._dynamo.config.allow_rnn:
        return
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if isinstance(node.target, OpOverload) and node.target._schema.name in _RECURRENT:
                raise Uncompilable(
                    f"it has a recurrent layer ({node.target}), which a compiler takes apart into its steps; "
                    "it rounds otherwise then, and draws other numbers for its dropout. torch.compile leaves "
                    "such layers as they are too, unless torch._dynamo.config.allow_rnn is True"
                )


def check_margin_losses(gm: GraphModule) -> None:
    """Check that a graph of Dynamo's, with those in it, has no margin loss of several classes: AOTAutograd
    takes them apart. The one with several labels is another number then (2.05 for the example of torch's own
    documentation, 0.85 in eager mode; torch 2.13), and the other one rounds otherwise.

    Raises:
        Uncompilable: names the loss.
    """
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if any(name in str(node.target) for name in _MARGIN_LOSSES):
                raise Uncompilable(
                    f"it has a margin loss ({node.target}), which a compiler takes apart: it is another "
                    "number then, or rounds otherwise"
                )


def changed_by_tracing(gm: GraphModule) -> str:
    """Why a graph of Dynamo's is other numbers once AOTAutograd has traced it; empty where it is not."""
    try:
        check_recurrent(gm)
        check_margin_losses(gm)
    except Uncompilable as reason:
        return str(reason)
    return ""


def check_wrappers(module: nn.Module) -> None:
    """Check that no parameter or buffer wraps several tensors: a compiled graph has an input, and a gradient,
    for each of these, and autograd one for all of them.

    Raises:
        Uncompilable: names the parameter or buffer.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if len(innermost_tensors(tensor)) > 1:
            raise Uncompilable(
                f"{name!r} is a {type(tensor).__name__}, which wraps several tensors, and a backward pass of "
                "such a graph can't be divided"
            )


def refusal_text(error: BaseException) -> str:
    """Why, in one line, and the place in the user's code where there is one."""
    if isinstance(error, FailOnRecompileLimitHit):
        return _TOO_OFTEN.format(limit=torch._dynamo.config.recompile_limit)
    text = str(error)
    if _is_left_in_region(error):
        return f"Dynamo of torch {torch.__version__} can't trace its autocast regions ({_first_line(text)})"
    if isinstance(error, BackendCompilerFailed):
        inner = error.inner_exception
        if isinstance(inner, Uncompilable):
            return f"{inner}{_place(text)}"
        return failure_text(inner) if _place(str(inner)) else failure_text(inner) + _place(text)
    reason = _first_line(text) or type(error).__name__
    about = {name: value for name, _, value in (line.partition(": ") for line in _lines(text)[::-1])}
    if "Explanation" in about:
        reason = f"{reason} ({about['Explanation'].rstrip('.')})"
    return reason + _place(text)


def failure_text(error: BaseException) -> str:
    """What a compiler raised, in one line, and the place in the user's code where there is one."""
    return f"{type(error).__name__}: {_first_line(str(error))}{_place(str(error))}"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _first_line(text: str) -> str:
    return next(iter(_lines(text)), "")


def _place(text: str) -> str:
    _, _, users = text.partition("from user code:")
    places = list(_PLACE.finditer(users))
    if not places:
        return ""
    return f", at {places[-1]['file']}:{places[-1]['line']}: {places[-1]['code'].strip()}"
