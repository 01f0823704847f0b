from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partita._torch.fake.transforms import endings_of_transforms_seen

TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": torch.vmap(torch.sin, in_dims=1, out_dims=1),
    "grad": torch.func.grad(lambda x: x.sin().sum()),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "functionalize": torch.func.functionalize(lambda x: x.sin().add_(1)),
    "two": torch.vmap(torch.func.grad(lambda row: row.sin().sum())),
}


class Results(TorchFunctionMode):
    """Keeps what torch's functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[int, Any] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ids[id(result)] = result
        return result


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_a_transform_returns_is_the_result_of_a_function(name: str) -> None:
    x = torch.randn(3, 4)
    with Results() as alone:
        result = TRANSFORMS[name](x)
    assert id(result) not in alone.ids  # torch shows it to no mode
    with endings_of_transforms_seen(), Results() as seen:
        again = TRANSFORMS[name](x)
    assert id(again) in seen.ids
    assert torch.equal(again, result)
    with endings_of_transforms_seen():
        assert torch.equal(TRANSFORMS[name](x), result)
