"""Parts of a backward pass: torch's engine without the checks around it, and what a node does not tell."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from partita.errors import ExecutionError

__all__ = [
    "AsSaved",
    "accumulates_inside",
    "forget_hooks",
    "free_saved",
    "free_when_run",
    "gradient_nbytes",
    "hook_saved",
    "hooks_made",
    "hooks_paused",
    "inputs_of",
    "is_large",
    "is_opaque",
    "leaf_of",
    "run_backward",
    "sequence_number",
    "watch_gradient",
]


_SMALL_BYTES = 2**16

_WATCH = -1
"""Not the number of any other hook: torch counts from 0."""


class _Forgotten(threading.local):
    """Counts the hooks that compilers have made in a thread, for others may make some meanwhile."""

    hooks = 0


_forgotten = _Forgotten()

_NEVER_IN_PART = ("NativeGroupNormBackward0",)
"""Asked for the gradients of the weights alone, with an input that is channels-last, it crashes the process
(torch 2.13, CPU).
"""

_AT_ONCE = frozenset(
    {
        # means over the batch, which the gradient of the input needs, are the gradients of the weights
        *("NativeBatchNormBackward0", "NativeBatchNormLegitBackward0", "NativeBatchNormLegitBackward1"),
        *("BatchNormWithUpdateBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"),
        # all inputs, whatever is asked; recurrent layers of cuDNN and MIOpen go back through the inputs first
        *("CudnnRnnBackward0", "LstmMpsBackward0", "MiopenRnnBackward0", "MkldnnRnnLayerBackward0"),
        *("PreluKernelBackward0", "ThnnFusedGruCellBackward0", "ThnnFusedLstmCellBackward0"),
        *("ScaledDotProductCudnnAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0"),
        *("ScaledDotProductFlashAttentionBackward0", "ScaledDotProductFlashAttentionForCpuBackward0"),
        "ScaledDotProductFusedAttentionOverrideableBackward0",
    }
)
"""Nodes that compute the gradients of some inputs in the time that those of all take (see torch's formulas
of derivatives, and its kernels).
"""


class AsSaved:
    """For ``torch.autograd.graph.saved_tensors_hooks``: gives back what `pack` has packed, so it may run
    twice.
    """

    @staticmethod
    def pack(tensor: Tensor) -> list[Tensor]:
        """Return what autograd is to keep for ``tensor``."""
        return [tensor]

    def __call__(self, packed: Any) -> Tensor:
        return packed[0] if packed else _freed(packed)

    def let_go(self, packed: Any) -> None:
        """Free what was packed: its node does not run again."""
        packed.clear()


def run_backward(
    roots: Sequence[Tensor | GradientEdge],
    seeds: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge] = (),
    *,
    accumulate: bool,
    keep_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """One run of the autograd engine, without the checks of ``torch.autograd.backward`` and ``grad``, and
    without compiled autograd.

    Args:
        roots: where it starts.
        seeds: the gradient of each root.
        inputs: where it ends; everywhere if there are none.
        accumulate: add to ``.grad`` of the inputs and return nothing, rather than return the gradients.
        keep_graph: the nodes that run may run again.

    Returns:
        The gradient of each input, None for one that no root depends on; nothing where it accumulates.
    """
    run = partial(
        torch.autograd.Variable._execution_engine.run_backward,
        tuple(roots),
        tuple(seeds),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    with _compiled_autograd_off():
        if not seeds or seeds[0].is_cpu:
            return run()
        # On a GPU the engine has a thread of its own for the device. To go there and back takes as long as
        # some small kernels, and Python's lock goes back and forth between the threads with each hook.
        with torch.autograd.set_multithreading_enabled(False):
            return run()


def _compiled_autograd_off() -> AbstractContextManager[None]:
    """Let the engine itself run the passes of a block. Compiled autograd traces what a node computes as a
    whole, and never runs the node: its second half would be nothing, and weights without a gradient.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # it is imported by who uses it
    if compiled is None or not compiled.compiled_autograd_enabled:
        return nullcontext()
    off: AbstractContextManager[None] = compiled._disable()
    return off


def run_nodes(
    calls: Sequence[tuple[Node, tuple[Tensor | None, ...]]], wanted: Sequence[GradientEdge]
) -> list[tuple[Tensor | None, ...]]:
    """Run each of some nodes by itself, but in one run of the engine: each takes as long as small kernels.

    No hooks run, neither theirs nor those of what comes after them. What a node has saved is freed where a
    large gradient arrives there, and else left for `free_saved`, which takes as long as small kernels too.

    Args:
        calls: nodes, each with the gradients that arrive there.
        wanted: the edges from any of them whose gradients are computed, and no others.

    Returns:
        For each node the gradient of each of its edges, as it leaves the node: it may have another dtype than
        what comes after it and, where it is small, more elements. None where it is not wanted, or there is
        none.
    """
    results: list[tuple[Tensor | None, ...]] = []

    def run(_: Tensor) -> None:
        for node, gradients in calls:
            leaving = node(*gradients)  # type: ignore[operator]
            if is_large(gradients):
                # what was broadcast leaves as large as the activation: summed now, one is there at a time
                leaving = tuple(map(_summed, leaving, node.next_functions))
                free_saved(node)
            results.append(leaving)

    # A node computes what the run that it belongs to wants: that is one which is to end at these edges, but
    # starts somewhere else and never gets there.
    start = torch.zeros((), requires_grad=True)
    start._backward_hooks = OrderedDict({_WATCH: run})
    run_backward([start], [torch.ones(())], [start, *wanted], accumulate=False)
    return results


def is_large(gradients: Sequence[Tensor | None]) -> bool:
    """Whether there is much in any of them, so that kernels take longer than what is done around them."""
    return any(gradient is not None and gradient.nbytes > _SMALL_BYTES for gradient in gradients)


def free_saved(node: Node) -> None:
    """Free what a node has saved: it can't run again. See `free_when_run`."""
    _free(_saved_of(node))


def _summed(gradient: Tensor | None, edge: tuple[Node | None, int]) -> Tensor | None:
    """A gradient as the engine hands it on along an edge, but for its dtype."""
    node, number = edge
    if gradient is None or node is None:
        return gradient
    metadata = node._input_metadata[number]
    if metadata.is_nested_tensor or gradient.shape == metadata.shape:
        return gradient
    return gradient.sum_to_size(metadata.shape)


def gradient_nbytes(edge: GradientEdge) -> int:
    """Return how large the gradient is that goes along an edge; 0 for a nested tensor's: nobody knows it."""
    metadata = edge.node._input_metadata[edge.output_nr]
    return 0 if metadata.is_nested_tensor else prod(metadata.shape) * metadata.dtype.itemsize


def inputs_of(node: Node) -> int:
    """Return how many gradients a node takes: one for each output of what it goes back through."""
    return len(node._input_metadata)


def hooks_made() -> int:
    """Return a number that grows with each hook that Python code registers anywhere, but for those of
    compilers (`forget_hooks`).
    """
    return RemovableHandle.next_id - _forgotten.hooks


def forget_hooks(before: int) -> None:
    """Do not count, in this thread, the hooks made since `hooks_made` was ``before``: a compiler made them
    for itself.
    """
    _forgotten.hooks += hooks_made() - before


def is_opaque(node: Node) -> bool:
    """Whether running the node twice, each time for some of its inputs, costs more than running it once, or
    can't be done.

    It costs more where Python code (a custom ``autograd.Function``, what ``torch.compile`` made), unknown C++
    or one kernel computes the gradients of all inputs together, and where unpacking a saved tensor runs a
    hook: a checkpoint computes its forward again, an offloaded tensor is fetched.
    """
    name = type(node).__name__
    if isinstance(node, BackwardCFunction) or name == "CppFunction" or name in _NEVER_IN_PART:
        return True
    if name in _AT_ONCE and getattr(node, "_saved_training", True):  # in evaluation there are no means
        return True
    return any(map(_is_hooked, _saved_of(node)))


def free_when_run(node: Node) -> None:
    """Free the tensors that a node has saved as soon as it has run, as a backward pass does that does not
    keep the graph.

    The node can't run again. What hooks of others have packed is theirs, and stays.
    """
    saved = _saved_of(node)
    if saved:  # the node holds the hook: without a reference to the saved tensors' owner there is no cycle
        node.register_hook(partial(_free, saved))


def hook_saved(
    node: Node,
    is_wanted: Callable[[Tensor], bool],
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
) -> bool:
    """Let hooks have some of what a node has saved, as if they had been there in the forward pass. What has
    been written to since is left to autograd, which refuses it, and what other hooks have packed to them.

    Returns:
        Whether there is any.
    """
    any_wanted = False
    for name in _saved_names(type(node)):
        item = getattr(node, name)
        for one in item if isinstance(item, (tuple, list)) else (item,):
            if one.unpack_hook is None and one.data is not None and is_wanted(one.data):
                any_wanted = True
                with suppress(RuntimeError):
                    # says so where it has been written to
                    getattr(node, "saved_tensors" if isinstance(node, BackwardCFunction) else name[4:])
                    one.register_hooks(pack, unpack)
    return any_wanted


def _saved_of(node: Node) -> list[Any]:
    return [getattr(node, name) for name in _saved_names(type(node))]


def _free(saved: list[Any], *_: object) -> None:
    for item in saved:
        for one in item if isinstance(item, (tuple, list)) else (item,):
            hook = one.unpack_hook
            if isinstance(hook, AsSaved):
                hook.let_go(one.data)
            elif hook is None and one.data is not None:  # else it is freed already, or was saved as None
                with suppress(RuntimeError):  # a number, which a dispatch mode does not take for a tensor
                    one.register_hooks(_nothing, _freed)


def _nothing(_: Tensor) -> None:
    return None


def _freed(_: object) -> Tensor:
    raise ExecutionError(
        "a tensor that a backward pass needed was freed after it: go backward through a "
        "microbatch's graph once"
    )


def accumulates_inside(node: Node) -> bool:
    """Whether the node is a reentrant checkpoint: running it adds to ``.grad`` of parameters that the graph
    does not show, and it runs in a backward pass without ``inputs`` only.
    """
    return isinstance(node, BackwardCFunction) and node.name() == "CheckpointFunctionBackward"


def leaf_of(node: Node) -> Tensor | None:
    """Return the tensor into whose ``.grad`` the node accumulates; None for a node that does not."""
    return getattr(node, "variable", None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def let_go_of_leaves(leaves: list[Tensor]) -> None:
    """Take all tensors off the list, and free the memory of each that nobody has but its own node in an
    autograd graph: that node has it for as long as there is the graph, and needs it no more.

    How many owners such a leaf has is counted of another tensor, in the same way and at the same moment: it
    depends on Python's version, and on who watches or compiles what runs. That one is had by a view, which is
    made in half the time of a node, and is not shown to modes: they may keep what they see.
    """
    if not leaves:
        return  # the first stage has none
    with torch._C.DisableTorchFunction():
        unwatched = torch._C._DisableTorchDispatch()
        others = [torch.empty(0)]
        view = others[0].view_as(others[0])
        _, owners = _last(others)
        while leaves:
            leaf, its_owners = _last(leaves)
            if type(leaf) is Tensor and its_owners == owners:
                leaf.data = leaf.new_empty(0)
        del view, unwatched


def _last(tensors: list[Tensor]) -> tuple[Tensor, tuple[int, int]]:
    """Take the last tensor off; with the numbers of its owners in Python and in torch."""
    last = tensors.pop()
    return last, (sys.getrefcount(last), last._use_count())  # type: ignore[attr-defined]


def sequence_number(node: Node) -> int:
    """Return the node's priority: of those that are ready, the engine runs the one with the largest first."""
    return node._sequence_nr()


def watch_gradient(leaf: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Call ``hook`` with each gradient that arrives at a leaf, after its other hooks, as long as the leaf
    lives; with None where a node ran that has no gradient for it. `hooks_made` does not count it.
    """
    hooks = leaf._backward_hooks
    if hooks is None:
        leaf._backward_hooks = OrderedDict({_WATCH: hook})
    else:
        hooks[_WATCH] = hook


@contextmanager
def hooks_paused(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Disable, in a block, these leaves' hooks (also of ``register_post_accumulate_grad_hook``)."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    tables = [getattr(tensor, kind, None) for tensor in tensors for kind in kinds]
    paused = [(hooks, dict(hooks)) for hooks in tables if hooks]
    for hooks, _ in paused:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in paused:
            hooks.update(content)


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _is_hooked(saved: Any) -> bool:
    if isinstance(saved, (tuple, list)):
        return any(map(_is_hooked, saved))
    hook = getattr(saved, "unpack_hook", None)
    return hook is not None and not isinstance(hook, AsSaved)
