"""What is said of a model that can't be captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule
from torch.nn.parameter import is_lazy

from partita._torch.distributed.gradient_sync import data_parallel_part
from partita._torch.export.export import Way
from partita._torch.modules.compiled import inside_compiled
from partita._torch.modules.contents import has_backward_hooks
from partita.capture.proving.proof import Disproof
from partita.capture.tracing.blame import users_line
from partita.errors import CaptureError

__all__ = ["CREATED_PARAMETER", "check_call", "refusal", "short_refusal"]

CREATED_PARAMETER = (
    "forward makes a parameter (torch.nn.Parameter), which belongs to no stage. Where it does so in its "
    "first call only, call the model once, on an example, before it is cut; else make it in __init__"
)
_ADDED_TENSOR = (
    "forward adds a tensor to the model (a buffer, or in an attribute), which no graph holds. Where it does "
    "so in its first call only, such as a cache, call the model once, on an example, before it is cut; else "
    'make it in __init__, or cut the model at its blocks: pipeline(..., frontend="modules")'
)
_AT_BLOCKS = (
    'cut the model at its blocks and leave its code as it is: pipeline(..., frontend="modules"). The full '
    "text of the first error is attached as its cause"
)
_ADVICE = (
    "Take what can't be traced (.item(), data-dependent shapes, side effects on Python objects) out of "
    "forward, for example with torch.where or torch.cond; where the other mode can be traced, and is all "
    f"that is needed, capture it alone: modes='eval' or modes='train'; or {_AT_BLOCKS}"
)

_ON_META = (
    "it has weights on the meta device, and the example is on another. To cut it without weights, give "
    "an example that is there too (x.to('meta')), and let each stage load its own; or load it first"
)

_IN_TRACES = {
    "use_reentrant: True": (
        "forward calls torch.utils.checkpoint with use_reentrant=True, which no trace takes. Write "
        "use_reentrant=False: it computes the same, and can be traced"
    ),
    r"Calling train\(\) is not supported": (
        "it is a graph that torch.export made, whose mode can't be changed. Give the module that it was made "
        "from, or cut the graph as it is with partita.split"
    ),
    r"flex_attention\.BlockMask": (
        "an argument is a BlockMask, a function beside tensors, and a graph is given tensors alone. "
        "Give the tensors that its function reads, and call create_block_mask() in forward; or make a module "
        "of each stage's layers for PipelineStage(module, ...): a step takes a BlockMask as keyword argument"
    ),
    r"Unsupported input type <class (.+?)>|flatten_with_keys_fn for type: <class (.+?)>": (
        "an argument is, or holds, a {0}, and torch does not know its tensors. Register its class "
        "(torch.export.register_dataclass, or torch.utils._pytree.register_pytree_node with "
        "flatten_with_keys_fn=); or cut the model at its blocks, which are given it as it is: "
        'pipeline(..., frontend="modules")'
    ),
    r"torch\.autograd\.grad": (
        "forward takes gradients itself (torch.autograd.grad), which no graph holds. Cut the model's own "
        'code, with all that such a gradient goes back through in a stage: pipeline(..., frontend="modules")'
    ),
    r"requires_grad_\(\) call": (
        "forward lets a tensor require gradients (requires_grad_()), which no graph holds. Cut the model's "
        "own code, with all that a gradient which forward takes goes back through in a stage: "
        'pipeline(..., frontend="modules")'
    ),
    r"torch\.nn\.Parameter\(\)": CREATED_PARAMETER,
    "and meta!": _ON_META,
    "different devices cpu, meta": _ON_META,  # torch 2.11
}
"""What a trace's error says of what the model does (patterns), and what helps."""


def check_call(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse what nothing can be made of, before anything is tried.

    Raises:
        CaptureError: ``model`` is no module of Python code, is compiled, has parameters without a shape,
            reduces gradients by itself or is tensor parallel; or ``args`` is no tuple.
    """
    # What is not given as Python code with arguments.
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        cure = f"make one, {model.__name__}(...)" if is_class else "call it in the forward of a module"
        raise CaptureError(f"the model is a torch.nn.Module, got {type(model).__name__}: {cure}")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"the model is a {type(model).__name__} of torch.jit, whose Python code is gone: give the module "
            "that it was made from"
        )
    if inside_compiled(model) is not None:
        raise CaptureError(
            "the model is what torch.compile returned, whose kernels no stage would run, and which round "
            "otherwise than the graph of a stage: give the module that was compiled, and compile its stages, "
            "pipeline(..., compile=True) or stage.compile()"
        )
    if not isinstance(args, tuple):
        cure = "write (x,) for a single one"
        if isinstance(args, Mapping):
            cure = "give () there, and arguments by name as the next argument"
        raise CaptureError(f"args is a tuple of positional arguments, got {type(args).__name__}: {cure}")
    # Parameters that are not there yet, or on other ranks too.
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise CaptureError(
            f"{type(model).__name__} has parameters without a shape yet ({_some(lazy)}): call it once, on an "
            "example, so that its lazy modules get theirs"
        )
    part = data_parallel_part(model)
    if part is not None:
        name, inner = part
        where = f"{name!r} is a {type(inner).__name__}" if name else "as a whole"
        raise CaptureError(
            f"{type(model).__name__} is data parallel already ({where}), and the stages of a pipeline reduce "
            "gradients by themselves. Cut the model as it was before it was wrapped, sharded or replicated "
            "(the .module of a DistributedDataParallel; after replication.close() of partita's), and wrap "
            "each stage: stage.module = DistributedDataParallel(stage.module), or fully_shard(stage.module)"
        )
    spread = {name: value for name, value in model.named_parameters() if isinstance(value, DTensor)}
    if spread:
        name, value = next(iter(spread.items()))
        raise CaptureError(
            f"{type(model).__name__} is distributed over a mesh already ({_some(list(spread))}; {name!r} "
            f"is {value.placements} of {value.device_mesh}), and neither a graph nor a stage of its blocks "
            "holds tensor parallel layers. Make a module of each stage's layers, parallelize_module() that, "
            "and give it to PipelineStage(module, ...)"
        )


def refusal(model: nn.Module, training: bool, reasons: Sequence[tuple[Way, Exception]]) -> str:
    """Return the message for a model that can't be captured in one mode.

    Args:
        reasons: why each way of tracing failed.
    """
    mode = "training" if training else "evaluation"
    # An error of partita's own says more than what strict mode comes across afterwards.
    if not isinstance(reasons[0][1], CaptureError):
        texts = [str(error).replace("'", "") for _, error in reasons]
        for sign, cause in _IN_TRACES.items():
            match = next(filter(None, (re.search(sign, text) for text in texts)), None)
            if match is not None:
                what = cause.format(*filter(None, match.groups()))
                name = type(model).__name__
                return (
                    f"torch.export can't capture {name} (in {mode} mode): {what}. The first error is attached"
                )
    lines = [f"torch.export can't capture {type(model).__name__}:"]
    disproved = False
    for way, error in reasons:
        text = str(error).strip().splitlines() or ["(no message)"]
        if isinstance(error, Disproof):
            disproved = True
            lines.append(f"  the graph that it traces is not the model: {text[0]}")
        else:
            line = users_line(error)
            place = f"{'strict' if way == 'strict' else 'non-strict'} mode{f', at {line}' if line else ''}"
            lines.append(f"  {place}: {type(error).__name__}: {text[0]}")
        lines += [f"    {more.strip()}" for more in text[1:5]]
    added = any(
        isinstance(error, Disproof) and "but the reference adds it" in str(error) for _, error in reasons
    )
    advice = _ADDED_TENSOR if added else _ADVICE
    lines.append(f"(in {mode} mode.) {_cause(model, training=training) or advice}")
    if disproved:
        lines.append(
            'Where such a difference is of no account: prove="close" (or a Tolerance) accepts small ones, '
            "prove=False all"
        )
    return "\n".join(lines)


def _cause(model: nn.Module, *, training: bool) -> str:
    """What of the model no way of tracing takes, where it is seen without one."""
    scripted = _paths(model, lambda module: isinstance(module, torch.jit.ScriptModule))
    if scripted:
        return (
            f"{_some(scripted)} is a module of torch.jit, whose Python code is gone. Put the module there "
            "that it was made from"
        )
    hooked = _paths(model, has_backward_hooks)
    if hooked:
        return f"{_some(hooked)} has a backward hook, which no trace takes. Take it off, or {_AT_BLOCKS}"
    graph = GraphModule(nn.Module(), Graph())
    state = (
        *model.named_children(),
        *model.named_parameters(recurse=False),
        *model.named_buffers(recurse=False),
    )
    taken = [name for name, _ in state if hasattr(graph, name)]
    if taken:
        return (
            f"The model has {_some(taken)}, and a graph of torch has something else by that name. Rename it, "
            f"or {_AT_BLOCKS}"
        )
    averaging = _paths(model, _counts_its_batches) if training else []
    if averaging:
        return (
            f"{_some(averaging)} has momentum=None, and computes with the number of batches so far, which no "
            f"graph holds. Give it a momentum, or {_AT_BLOCKS}"
        )
    return ""


def _counts_its_batches(module: nn.Module) -> bool:
    """Whether it is a batch norm whose statistics are the mean over all batches."""
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
    return isinstance(module, kinds) and module.track_running_stats and module.momentum is None


def _paths(model: nn.Module, which: Callable[[nn.Module], bool]) -> list[str]:
    return [path or "the model" for path, module in model.named_modules() if which(module)]


def _some(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first!r}{f' and {len(more)} more' if more else ''}"


def short_refusal(reason: str) -> str:
    """Return the one line of a refusal that says what stands in the way."""
    lines = [line.strip() for line in reason.splitlines()]
    return lines[1] if len(lines) > 1 else lines[0]
