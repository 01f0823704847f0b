"""The training flags of a captured graph, and switching the mode of a model while it is captured.

A captured graph reads the flags of the modules that its nodes come from, as the model does::

    dropout(x, 0.1, blocks.0.dropout.training)
    sdpa(q, k, v, None, {False: 0.0, True: 0.1}[blocks.0.attention.training])

so ``train()`` and ``eval()`` work on it and on its submodules. A flag is a ``get_attr`` node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita.errors import CaptureError

__all__ = [
    "add_check",
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
    """Return whether a graph for one mode is for training."""
    return captured_mode(module) is True


def captured_mode(module: GraphModule) -> bool | None:
    """Return the mode of a graph for one mode (True for training), None for a graph for both."""
    checks = module.graph.find_nodes(op="call_function", target=require_mode)
    return next((bool(node.args[1]) for node in checks), None)


def drop_mode_check(module: GraphModule) -> None:
    """Remove the check of `require_mode` from a graph, in place: the caller checks the mode."""
    for node in module.graph.find_nodes(op="call_function", target=require_mode):
        flag = node.args[0]
        module.graph.erase_node(node)
        if isinstance(flag, Node) and not flag.users:
            module.graph.erase_node(flag)
    module.recompile()


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Switch a model to training or evaluation within the block; then restore the flag of every module."""
    with flags_kept(model.modules()):
        model.train(training)
        yield


@contextmanager
def flags_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the training flag of each module at the end of the block."""
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def mode_flag(module: GraphModule, path: str) -> Node:
    """Return the node at the head of the graph that reads the training flag of the submodule at ``path``.

    There is one node for each path. A submodule that does not exist in the graph's module is added, empty.
    """
    target = f"{path}.{_FLAG}" if path else _FLAG
    for existing in module.graph.find_nodes(op="get_attr", target=target):
        return existing
    _ensure(module, path)
    with module.graph.inserting_before(_first(module.graph)):
        return module.graph.create_node("get_attr", target)


def add_check(module: GraphModule, check: Callable[..., None], *args: Any) -> None:
    """Let a graph, in place, call ``check`` before it computes anything.

    Args:
        check: raises where the graph must not run.
        args: constants, or the node of `mode_flag`.
    """
    with module.graph.inserting_after(mode_flag(module, "")):
        module.graph.call_function(check, args)
    module.recompile()


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
