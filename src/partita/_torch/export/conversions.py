"""Conversions to the dtype that a tensor has already (``x.float()`` of a float32): they return the tensor
itself, so a tracer takes every later use of the tensor for one of the conversion::

    logits = self.head(hidden)
    loss = cross_entropy(logits.float(), labels)
    return loss, logits                             traced: logits.float()

Under autocast the two are not the same. Dropout returns the tensor itself, too, where it drops nothing: in
evaluation, and in training another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["conversions_apart", "drop_aliases"]

_CONVERSIONS = {
    Tensor.to,
    Tensor.type,
    Tensor.type_as,
    Tensor.bfloat16,
    Tensor.double,
    Tensor.float,
    Tensor.half,
}
_DROPOUTS: set[Any] = {
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
}
_ALIAS: Any = torch.ops.aten.alias.default
_KEPT_APART = {getattr(torch.ops.aten.to, name) for name in torch.ops.aten.to.overloads()} | {
    torch.ops.aten.type_as.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
    torch.ops.aten.unsqueeze.default,  # of `dropout1d` and its relatives, without a batch
}


class _Apart(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drops = func in _DROPOUTS and not (kwargs or {}).get("inplace")
        if (drops or func in _CONVERSIONS) and args and get_proxy_mode() is not None:
            tensor = args[0]
            if isinstance(tensor, FakeTensor) and (drops or not isinstance(tensor, nn.Parameter)):
                args = (_ALIAS(tensor), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def conversions_apart() -> Iterator[None]:
    """While ``torch.export`` traces (not in strict mode), a conversion returns another tensor than it takes.
    `drop_aliases` then cleans the graph.
    """
    with _Apart():
        yield


def drop_aliases(gm: GraphModule) -> None:
    """Remove what `conversions_apart` has added, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=_ALIAS):
        if node.users and all(map(_is_kept_apart, node.users)):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _is_kept_apart(node: Node) -> bool:
    return node.target in _KEPT_APART
