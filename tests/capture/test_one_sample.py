from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partita.capture import capture
from partita.capture.open_sizes.sizes import Sizes

WIDTH = 64
"""Enough numbers that another order of a sum is seen in some, whatever the weights."""


class Expands(nn.Module):
    """Has one position for all samples, and expands it where there is more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(WIDTH).unsqueeze(0)
        if x.shape[0] != positions.shape[0]:
            positions = positions.expand(x.shape[0], -1)
        return self.project(x) * positions[:, 0:]


class Doubles(Expands):
    """Does something else for one sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * 2 if x.shape[0] == 1 else self.project(x)


class Reorders(Expands):
    """Computes the same for one sample, but sums gradients in another order."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        expanded = h.expand(x.shape[0], WIDTH) if x.shape[0] != 1 else h
        return h.sin() + h.cos() + expanded.exp()


class Draws(Expands):
    """Draws a number that it does not use, but for one sample."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            torch.rand(3)
        return self.project(x)


class Constant(Expands):
    """Has another constant for one sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + (torch.tensor([1.0]) if x.shape[0] == 1 else torch.tensor([2.0]))


@pytest.mark.parametrize(
    "model", [Doubles(), Reorders(), Draws(), Constant()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_branch_that_can_be_observed_for_one_sample_keeps_it_out(model: nn.Module, batch: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, WIDTH)
    module = capture(model, (x,), prove=True).module
    assert torch.equal(module(x), model(x))
    sizes = Sizes.of(module)
    if batch == 1:
        assert not sizes.symbols
    else:
        assert not all(condition.holds({"batch": 1}) for condition in sizes.conditions)


def test_without_a_proof_the_models_own_conditions_hold() -> None:
    sizes = Sizes.of(capture(Expands(), (torch.randn(2, WIDTH),)).module)
    assert sizes.symbols
    assert not all(condition.holds({"batch": 1}) for condition in sizes.conditions)
    assert not Sizes.of(capture(Expands(), (torch.randn(1, WIDTH),)).module).symbols


@pytest.mark.parametrize("batch", [1, 2])
def test_a_branch_that_changes_nothing_for_one_sample_leaves_the_batch_open(batch: int) -> None:
    """Llama was refused a microbatch of one sample: its positions are expanded to the batch where they are
    fewer.
    """
    model = Expands()
    module = capture(model, (torch.randn(batch, WIDTH),), prove=True).module
    assert [symbol.name for symbol in Sizes.of(module).symbols] == ["batch"]
    Sizes.of(module).check({"batch": 1})
    for size in (1, 2, 5):
        x = torch.randn(size, WIDTH)
        assert torch.equal(module(x), model(x))


class Two(Expands):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if x.shape[0] < 5 and x.shape[0] != 3 else h * 2


def test_other_conditions_stay() -> None:
    module = capture(Two(), (torch.randn(2, WIDTH),), prove=True).module
    sizes = Sizes.of(module)
    holds = [all(one.holds({"batch": size}) for one in sizes.conditions) for size in range(1, 6)]
    assert holds == [True, True, False, True, False]


class Normed(Expands):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def test_a_model_that_takes_no_single_sample_is_still_refused_one() -> None:
    sizes = Sizes.of(capture(Normed(), (torch.randn(2, WIDTH),), prove=True).module)
    assert not all(one.holds({"batch": 1}) for one in sizes.conditions)


class OfAnyLength(Expands):
    """Shifts its samples as language models do, and asks how many there are; perhaps does something else for
    one sample that is long.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        if x.shape[0] != positions.shape[0]:
            positions = positions.expand(x.shape[0], -1)
        shifted = nn.functional.pad(positions, (0, 1))[..., 1:].contiguous()
        h = self.project(x) * shifted[..., None]
        return h * 2 if x.shape[0] == 1 and x.shape[1] > self.longest else h


@pytest.mark.parametrize("longest", [64, 4, 3])
def test_one_sample_passes_where_its_length_is_open_too(longest: int) -> None:
    """Causal language models that were fine-tuned with padding to the longest sample were refused a batch of
    one: the last of an epoch, or each.
    """
    model = OfAnyLength(longest)
    shapes = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    module = capture(model, (torch.randn(2, 4, WIDTH),), dynamic_shapes=shapes, prove=True).module
    sizes = Sizes.of(module)
    batch, length = (symbol.name for symbol in sizes.symbols)
    admitted = all(one.holds({batch: 1, length: 9}) for one in sizes.conditions)
    assert admitted is (longest == 64)
    for shape in [(1, 4), (1, 9), (3, 7)][0 if admitted else 2 :]:
        x = torch.randn(*shape, WIDTH)
        sizes.check(dict(zip((batch, length), shape, strict=True)))
        assert torch.equal(module(x), model(x))
