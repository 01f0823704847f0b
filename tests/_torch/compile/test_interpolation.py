from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from partita._torch.compile.interpolation import interpolation_of_kernels


@pytest.mark.parametrize(("mode", "dims"), [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)])
def test_graphs_that_run_by_operator_interpolate_as_eager_mode_does(mode: str, dims: int) -> None:
    """Results and gradients differed in last bits from those of the model, as with plain aot_eager."""
    resized = partial(torch.nn.functional.interpolate, scale_factor=3.3, mode=mode, align_corners=False)
    torch._dynamo.reset()
    compiled = torch.compile(resized, backend="partita_ddp", options={"inner": "aot_eager"}, dynamic=True)
    weight = torch.randn(2, 3, *[16] * dims)
    for size in (5, 6):
        results: list[tuple[Tensor, Tensor]] = []
        for function in (compiled, resized):
            x = torch.linspace(0, 1, 6 * size**dims).view(2, 3, *[size] * dims).sin().requires_grad_()
            y = function(x)
            (y * torch.nn.functional.interpolate(weight, y.shape[2:])).sum().backward()
            assert x.grad is not None
            results.append((y, x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_elsewhere_traces_are_as_they_were() -> None:
    op = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(op.py_kernels)
    with interpolation_of_kernels():
        assert len(op.py_kernels) < len(before)
    assert op.py_kernels == before
