"""``tensor[index]`` by the numbers of a ``vmap``, which the masks of transformers 4 are made of.

Torch indexes by a ``torch.autograd.Function`` there, for the gradients of flex attention, and nothing traces
that within a ``vmap``. Where no gradient is asked for, it is the operator that its forward pass calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import _trace_wrapped_higher_order_op as home
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from partita._torch.containers.replaced import replaced

__all__ = ["mapped_indexing_is_an_operator"]


@contextmanager
def mapped_indexing_is_an_operator() -> Iterator[None]:
    """While ``torch.export`` traces (not strictly), index by ``aten.index`` where that needs no gradient."""
    original: Any = home.mod_index

    def indexed(tensor: Tensor, indices: Sequence[Tensor]) -> Any:
        if get_proxy_mode() is None or tensor.requires_grad:
            return original(tensor, indices)
        return torch.ops.aten.index(tensor, indices)

    with replaced(home, "mod_index", indexed):
        yield
