"""Effect rules for ``call_module`` nodes: known torch.nn modules, graphs, and everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.modules.contents import has_forward_hooks, is_guards_module
from partita.graph.use import Use, nodes_in, opaque

__all__ = ["module_use"]

_PLAIN = (
    nn.Linear, nn.Bilinear, nn.LazyLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
    nn.ConvTranspose2d, nn.ConvTranspose3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d,
    nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softmax,
    nn.LogSoftmax,
    nn.Softplus, nn.Softsign, nn.PReLU, nn.GLU, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
    nn.LocalResponseNorm, nn.CosineSimilarity, nn.PairwiseDistance, nn.L1Loss, nn.MSELoss,
    nn.CrossEntropyLoss, nn.NLLLoss,
    nn.BCELoss, nn.BCEWithLogitsLoss, nn.SmoothL1Loss, nn.HuberLoss, nn.KLDivLoss, nn.Upsample,
    nn.ZeroPad2d,
    nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.PixelShuffle, nn.PixelUnshuffle, nn.Unfold, nn.Fold,
)  # fmt: skip
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten)
_MAYBE_INPLACE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.Mish, nn.Hardtanh, nn.Hardsigmoid,
    nn.Hardswish, nn.Threshold,
)  # fmt: skip
_RANDOM = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
    nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip
_RUNNING = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
_WITH_DROPOUT = (
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder,
    nn.TransformerDecoder, nn.Transformer,
)  # fmt: skip
_PLAIN_TYPES, _PASSING_TYPES, _INPLACE_TYPES = (
    frozenset(_PLAIN),
    frozenset(_PASSING),
    frozenset(_MAYBE_INPLACE),
)
_RANDOM_TYPES, _RUNNING_TYPES = frozenset(_RANDOM), frozenset(_RUNNING)
_DROPOUT_TYPES = frozenset(_RECURRENT + _WITH_DROPOUT)


def module_use(module: nn.Module, node: Node, graph_use: Callable[[GraphModule, Node], Use]) -> Use:
    """The effects of calling ``module`` at ``node``.

    A training flag may change after the cut, so dropout counts as random and batch norm as writing whatever
    the flag says now.

    Args:
        graph_use: how a nested graph is analysed (passed in, since that analysis calls this one).
    """
    if is_guards_module(module):
        return Use(host=True, why="the input checks of an exported program")
    if any(has_forward_hooks(inner) for inner in module.modules()):
        return _with_state(opaque(node, f"unknown hooks of module {node.target!r}"), module, writes=True)
    return _known_use(module, node, graph_use)


def _known_use(module: nn.Module, node: Node, graph_use: Callable[[GraphModule, Node], Use]) -> Use:
    kind = type(module)
    operands = tuple(node.all_input_nodes)
    first = nodes_in(node.args[:1]) or operands[:1]
    why = f"module {node.target!r} ({kind.__name__})"
    if isinstance(module, GraphModule):
        return _with_state(graph_use(module, node), module, writes=False)
    if kind in _PLAIN_TYPES:
        return _with_state(Use(), module, writes=False)
    if kind in _PASSING_TYPES:
        return Use(aliases=operands)
    if kind in _INPLACE_TYPES:
        return Use(writes=first, aliases=first, why=why) if module.inplace else Use()
    if kind in _RANDOM_TYPES:
        written = first if getattr(module, "inplace", False) else ()
        return Use(writes=written, aliases=first, random=True, why=why)
    if kind in _RUNNING_TYPES:
        return Use(state=tuple(module.parameters()), written_state=tuple(module.buffers()), why=why)
    if kind is nn.Embedding or kind is nn.EmbeddingBag:
        return _with_state(Use(why=why), module, writes=module.max_norm is not None)
    if kind in _DROPOUT_TYPES:
        return _with_state(Use(random=_drops(module), why=why), module, writes=False)
    if isinstance(module, nn.Sequential) and kind is nn.Sequential:
        return _sequential_use(module, node, graph_use)
    return _with_state(opaque(node, f"unknown module {node.target!r} ({kind.__name__})"), module, writes=True)


def _drops(module: nn.Module) -> bool:
    """Whether a recurrent or attention module may drop anything at all."""
    rates = [getattr(inner, "dropout", 0.0) for inner in module.modules()]
    return any(not isinstance(rate, (int, float)) or rate > 0 for rate in rates)


def _sequential_use(module: nn.Sequential, node: Node, graph_use: Callable[[GraphModule, Node], Use]) -> Use:
    """The union over its children, each as if it were given the operands of the whole."""
    uses = [_known_use(child, node, graph_use) for child in module]
    return Use(
        writes=tuple(dict.fromkeys(operand for use in uses for operand in use.writes)),
        aliases=tuple(dict.fromkeys(operand for use in uses for operand in use.aliases)),
        state=tuple(tensor for use in uses for tensor in use.state),
        written_state=tuple(tensor for use in uses for tensor in use.written_state),
        random=any(use.random for use in uses),
        host=any(use.host for use in uses),
        barrier=any(use.barrier for use in uses),
        entangles=any(use.entangles for use in uses),
        why="; ".join(use.why for use in uses if use.observable),
    )


def _with_state(use: Use, module: nn.Module, *, writes: bool) -> Use:
    tensors: tuple[torch.Tensor, ...] = (*module.parameters(), *module.buffers())
    if writes:
        return replace(use, written_state=use.written_state + tensors)
    return replace(use, state=use.state + tensors)
