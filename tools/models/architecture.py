"""An architecture: a row of the table. How its model is made, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tools.models.samples import KINDS, varied
from tools.models.torchvision_stub import prepare_torchvision
from torch import nn

__all__ = ["Architecture", "Inputs", "Make", "Part", "hf", "make_inputs", "make_model"]

Inputs = Callable[[Any, int], dict[str, Any]]
Make = Callable[[], tuple[nn.Module, Any]]
Part = Literal[1, 2]


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: what the row is called.
        family: the group of rows that it stands in.
        model: the model's class.
        make: gives the model and its configuration.
        inputs: from the configuration and a batch size to keyword arguments.
        shared: keyword arguments that have no batch: each microbatch gets them whole.
    """

    name: str
    family: str
    model: str
    make: Make
    inputs: Inputs
    shared: tuple[str, ...] = ()


def hf(
    name: str,
    family: str,
    model: str,
    config: str,
    inputs: Inputs,
    settings: Mapping[str, Any] | None = None,
    shared: tuple[str, ...] = (),
) -> Architecture:
    """Describe a class of ``transformers`` with a configuration of its own."""

    def make() -> tuple[nn.Module, Any]:
        prepare_torchvision()
        import transformers  # an extra, and slow

        configuration = getattr(transformers, config)(**settings or {})
        return getattr(transformers, model)(configuration), configuration

    return Architecture(name, family, model, make, inputs, shared)


def make_model(architecture: Architecture) -> tuple[nn.Module, Any]:
    """Make the model, in the same random state each time, and its configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return architecture.make()


def make_inputs(
    architecture: Architecture, config: Any, samples: int, seed: int = 1, kind: KINDS = "own"
) -> dict[str, Any]:
    """Draw keyword arguments for a batch of so many samples.

    Args:
        kind: what masks look like: as the architecture's row says, of ones, or with other padding.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return varied(architecture.inputs(config, samples), kind)
