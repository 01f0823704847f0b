"""The effects of ``call_module`` nodes: of torch.nn's own modules, of graphs, and of everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.modules.contents import has_forward_hooks, is_guards_module
from partita.graph.effect_rules.node_effect import NodeEffect, combined, nodes_in, opaque

__all__ = ["module_effect"]

_PURE = frozenset((
    nn.Linear, nn.Bilinear, nn.LazyLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
    nn.ConvTranspose2d, nn.ConvTranspose3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d,
    nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
    nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax, nn.Softplus, nn.Softsign, nn.PReLU, nn.GLU,
    nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.LocalResponseNorm, nn.CosineSimilarity,
    nn.PairwiseDistance, nn.L1Loss, nn.MSELoss, nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss,
    nn.BCEWithLogitsLoss, nn.SmoothL1Loss, nn.HuberLoss, nn.KLDivLoss, nn.Upsample, nn.ZeroPad2d,
    nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d, nn.PixelShuffle, nn.PixelUnshuffle, nn.Unfold, nn.Fold,
))  # fmt: skip
_ALIASING = frozenset((nn.Identity, nn.Flatten, nn.Unflatten))
_MAYBE_INPLACE = frozenset((
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.Mish, nn.Hardtanh, nn.Hardsigmoid,
    nn.Hardswish, nn.Threshold,
))  # fmt: skip
_RANDOM = frozenset((
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
    nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
))  # fmt: skip
_WITH_RUNNING_STATISTICS = frozenset((
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
))  # fmt: skip
_WITH_DROPOUT_INSIDE = frozenset((
    nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell, nn.MultiheadAttention,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.Transformer,
))  # fmt: skip


GraphEffect = Callable[[GraphModule, Node], NodeEffect]
"""Analyses a nested graph that a node calls."""


def module_effect(module: nn.Module, node: Node, graph_effect: GraphEffect) -> NodeEffect:
    """Return the effect of calling ``module`` at ``node``.

    A training flag may change after the cut, so dropout counts as random and batch norm as writing whatever
    the flag says now.

    Args:
        graph_effect: passed in, since the analysis of a graph calls this function.
    """
    if is_guards_module(module):
        return NodeEffect(host=True, why="the input checks of an exported program")
    if any(has_forward_hooks(inner) for inner in module.modules()):
        return _with_state(opaque(node, f"unknown hooks of module {node.target!r}"), module, writes=True)
    return _effect_by_class(module, node, graph_effect)


def _effect_by_class(module: nn.Module, node: Node, graph_effect: GraphEffect) -> NodeEffect:
    kind = type(module)
    operands = tuple(node.all_input_nodes)
    first = nodes_in(node.args[:1]) or operands[:1]
    why = f"module {node.target!r} ({kind.__name__})"
    if isinstance(module, GraphModule):
        return _with_state(graph_effect(module, node), module, writes=False)
    if kind in _PURE:
        return _with_state(NodeEffect(), module, writes=False)
    if kind in _ALIASING:
        return NodeEffect(aliases=operands)
    if kind in _MAYBE_INPLACE:
        return NodeEffect(writes=first, aliases=first, why=why) if module.inplace else NodeEffect()
    if kind in _RANDOM:
        written = first if getattr(module, "inplace", False) else ()
        return NodeEffect(writes=written, aliases=first, random=True, why=why)
    if kind in _WITH_RUNNING_STATISTICS:
        return NodeEffect(state=tuple(module.parameters()), written_state=tuple(module.buffers()), why=why)
    if kind is nn.Embedding or kind is nn.EmbeddingBag:
        return _with_state(NodeEffect(why=why), module, writes=module.max_norm is not None)
    if kind in _WITH_DROPOUT_INSIDE:
        return _with_state(NodeEffect(random=_may_drop(module), why=why), module, writes=False)
    if isinstance(module, nn.Sequential) and kind is nn.Sequential:
        # each child as if it were given the operands of the whole
        effects = [_effect_by_class(child, node, graph_effect) for child in module]
        writes = [operand for effect in effects for operand in effect.writes]
        aliases = [operand for effect in effects for operand in effect.aliases]
        return combined(effects, writes, aliases, "; ".join(each.why for each in effects if each.observable))
    return _with_state(opaque(node, f"unknown module {node.target!r} ({kind.__name__})"), module, writes=True)


def _may_drop(module: nn.Module) -> bool:
    """Whether any dropout rate in a recurrent or attention module is, or may be, above 0."""
    rates = [getattr(inner, "dropout", 0.0) for inner in module.modules()]
    return any(not isinstance(rate, (int, float)) or rate > 0 for rate in rates)


def _with_state(effect: NodeEffect, module: nn.Module, *, writes: bool) -> NodeEffect:
    tensors: tuple[torch.Tensor, ...] = (*module.parameters(), *module.buffers())
    if writes:
        return replace(effect, written_state=effect.written_state + tensors)
    return replace(effect, state=effect.state + tensors)
