"""``tensor.data`` in a model that is traced: torch answers past its tracers, so that the result counts as a
constant without data. Its value, and what is written into it, are those of ``tensor.detach()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from partita.errors import CaptureError

__all__ = ["OTHER_DATA", "data_is_detached"]

OTHER_DATA = (
    "forward gives a tensor other data, which no tracer follows (weight.data = ...): write into it (with "
    "torch.no_grad(): weight.copy_(...))"
)

_GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


class _Detached(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (_GET_DATA, _SET_DATA)
            and isinstance(args[0], FakeTensor)
            and get_proxy_mode() is not None
        ):
            if func == _SET_DATA:
                raise CaptureError(OTHER_DATA)
            return args[0].detach()
        return func(*args, **(kwargs or {}))


@contextmanager
def data_is_detached() -> Iterator[None]:
    """While ``torch.export`` traces (not in strict mode), ``tensor.data`` is ``tensor.detach()``. Where that
    differs, since autograd sees what is written into the latter, the graph raises in its backward pass. An
    assignment to it raises a `CaptureError`.
    """
    with _Detached():
        yield
