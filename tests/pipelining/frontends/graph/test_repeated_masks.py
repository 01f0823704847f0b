from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import partita
from partita.pipelining import Pipe, pipe_split, pipeline

LENGTH, WIDTH = 8, 4


class Masked(nn.Module):
    """Two layers of attention under one mask of L × L, made of a padding mask of L."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def mask(self, padding: Tensor) -> Tensor:
        return (torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & padding[:, None, :].bool())[:, None]

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = self.mask(padding)
        for number, layer in enumerate(self.layers):
            h = layer(x).unflatten(-1, (1, WIDTH)).transpose(1, 2)
            x = x + scaled_dot_product_attention(h, h, h, mask).transpose(1, 2).flatten(2)
            if number == 0:
                pipe_split()
        return x


def inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    padding = torch.ones(batch, LENGTH, dtype=torch.uint8)
    padding[0, -3:] = 0
    return torch.randn(batch, LENGTH, WIDTH), padding


def sent(pipe: Pipe) -> set[str]:
    return {str(value.dtype).removeprefix("torch.") for value in pipe.routes.values.values()}


def test_a_mask_is_worked_out_by_each_stage_from_the_input_that_it_follows_from() -> None:
    model = Masked()
    pipe = pipeline(model, inputs())
    assert sent(pipe) == {"float32", "uint8"}  # activations, and the padding in place of a mask of L × L
    for batch in (2, 3):
        partita.verify(pipe, model, inputs(batch)).check()


class Large(Masked):
    """The padding mask as int64 has more bytes than what follows from it."""

    def mask(self, padding: Tensor) -> Tensor:
        return padding[:, None, None, :].bool()


def test_a_mask_that_is_smaller_than_its_input_is_sent() -> None:
    x, padding = inputs()
    model = Large()
    pipe = pipeline(model, (x, padding.long()))
    assert sent(pipe) == {"float32", "bool"}
    partita.verify(pipe, model, (x, padding.long())).check()


class Written(Masked):
    """Another mask lies in the same memory when the second layer comes."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = self.mask(padding)
        x = self.layers[0](x) * mask.sum()
        mask.logical_not_()
        pipe_split()
        return self.layers[1](x) * mask.sum(-1)[0].mT


def test_a_mask_that_is_written_to_is_not_worked_out_twice() -> None:
    model = Written()
    pipe = pipeline(model, inputs())
    partita.verify(pipe, model, inputs()).check()


class Returned(Masked):
    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, padding), self.mask(padding)


def test_a_mask_that_the_model_returns_too_is_the_models_own() -> None:
    model = Returned()
    pipe = pipeline(model, inputs())
    partita.verify(pipe, model, inputs()).check()
