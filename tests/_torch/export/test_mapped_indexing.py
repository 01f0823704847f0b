from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import partita
from partita.pipelining import SplitPoint, pipeline


class Masks(nn.Module):
    """A padding mask for each sample, head, query and key, made as transformers 4 makes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.first(x)

        def allowed(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & padding[sample, key]

        mapped = allowed
        for level in reversed(range(4)):
            mapped = torch.vmap(mapped, in_dims=tuple(0 if at == level else None for at in range(4)))
        samples, heads, places = (torch.arange(size) for size in (len(x), 1, x.shape[1]))
        with TransformGetItemToIndex():
            mask = mapped(samples, heads, places, places)
        h = x[:, None]
        return self.last(nn.functional.scaled_dot_product_attention(h, h, h, mask)[:, 0])


def test_a_mask_that_indexes_within_a_vmap_is_captured_as_it_runs() -> None:
    """Tracing it was an error of torch's; strict mode follows it, and loses much else."""
    torch.manual_seed(0)
    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[1, 4:] = False
    model, x = Masks(), torch.randn(2, 5, 4)
    pipe = pipeline(model, (x, padding), split_spec={"first": SplitPoint.END})
    for batch in (1, 2):
        arguments = (torch.cat([x] * batch), torch.cat([padding] * batch))
        partita.verify(pipe, model, arguments).check()
