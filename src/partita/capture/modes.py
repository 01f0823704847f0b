"""The training flag: what of it a graph keeps, and how a model is switched while it is captured.

A captured graph reads the flags of the modules that its nodes come from, as the model does::

    dropout(x, 0.1, blocks.0.dropout.training)
    sdpa(q, k, v, None, {False: 0.0, True: 0.1}[blocks.0.attention.training])

so ``train()``, ``eval()``, and ``eval()`` on a part of it work. A flag is a ``get_attr`` node on that module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita.errors import CaptureError

__all__ = [
    "captured_mode",
    "captures_training",
    "copy_flags",
    "drop_mode_check",
    "flags_kept",
    "in_mode",
    "mode_flag",
    "require_mode",
]

_FLAG = "training"


def require_mode(training: bool, captured: bool, reason: str = "") -> None:
    """Refuse to run a graph in a mode that it was not captured in.

    Args:
        reason: why there is no graph for that mode.

    Raises:
        CaptureError: always where the two differ.
    """
    if training != captured:
        wanted, has = ("train", "eval") if training else ("eval", "train")
        raise CaptureError(
            f"this graph was captured in {has} mode and can't run in {wanted} mode, because "
            f"{reason or 'the model takes another path there'}: call .{has}() on it, or capture the model "
            f"again after model.{wanted}()"
        )


def captures_training(module: GraphModule) -> bool:
    """Whether a graph that holds for one mode only holds for training."""
    return captured_mode(module) is True


def captured_mode(module: GraphModule) -> bool | None:
    """The one mode that a graph holds for; None: both."""
    checks = module.graph.find_nodes(op="call_function", target=require_mode)
    return next((bool(node.args[1]) for node in checks), None)


def drop_mode_check(module: GraphModule) -> None:
    """Take the check of `require_mode` out of a graph, in place: whoever runs it looks at the mode."""
    for node in module.graph.find_nodes(op="call_function", target=require_mode):
        flag = node.args[0]
        module.graph.erase_node(node)
        if isinstance(flag, Node) and not flag.users:
            module.graph.erase_node(flag)
    module.recompile()


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Switch a model between training and evaluation; every module gets its own flag back."""
    with flags_kept(model.modules()):
        model.train(training)
        yield


@contextmanager
def flags_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give each module its own flag back at the end."""
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def mode_flag(module: GraphModule, path: str) -> Node:
    """The training flag of the submodule at ``path``, as a node at the head of the graph; one for each path.

    A submodule that the graph has no other use for is made (an empty one).
    """
    target = f"{path}.{_FLAG}" if path else _FLAG
    for existing in module.graph.find_nodes(op="get_attr", target=target):
        return existing
    _ensure(module, path)
    with module.graph.inserting_before(_first(module.graph)):
        return module.graph.create_node("get_attr", target)


def copy_flags(model: nn.Module, module: nn.Module) -> None:
    """Give each submodule of ``module`` the training flag of the model's submodule of that name."""
    flags = {name: child.training for name, child in model.named_modules(remove_duplicate=False)}
    for name, child in module.named_modules(remove_duplicate=False):
        child.training = flags.get(name, model.training)


def _ensure(module: nn.Module, path: str) -> None:
    for atom in path.split(".") if path else ():
        child = getattr(module, atom, None)
        if not isinstance(child, nn.Module):
            child = nn.Module()
            module.add_module(atom, child)
        module = child


def _first(graph: Graph) -> Node:
    return next(iter(graph.nodes))
