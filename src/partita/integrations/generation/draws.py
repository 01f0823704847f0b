"""Sampling as ``model.generate`` does it, where several loops take turns at one random generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

__all__ = ["Draws", "GlobalDraws", "SeededDraws", "SharedDraws", "get_state", "set_state"]


class Draws(ABC):
    """Where one loop has its random numbers from."""

    @abstractmethod
    def draw(self, probabilities: Tensor) -> Tensor:
        """Return a token for each row.

        Args:
            probabilities: float32[rows, vocabulary].

        Returns:
            int64[rows].
        """


@final
class GlobalDraws(Draws):
    """torch's own generator, as it comes."""

    def draw(self, probabilities: Tensor) -> Tensor:
        """See `Draws`."""
        return _multinomial(probabilities)


@final
class SeededDraws(Draws):
    """A stream of its own: that of torch's generator after ``torch.manual_seed(seed)``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: Tensor | None = None

    def draw(self, probabilities: Tensor) -> Tensor:
        """See `Draws`."""
        device = probabilities.device
        before = get_state(device)
        try:
            if self._state is None:
                _generator(device).manual_seed(self._seed)
            else:
                set_state(self._state, device)
            tokens = _multinomial(probabilities)
            self._state = get_state(device)
        finally:
            set_state(before, device)
        return tokens


@final
class SharedDraws(Draws):
    """Rows of a batch that was cut: each loop draws for all rows, and takes those that are its own.

    So a row gets the token that it would get if the batch were whole. The generator ends where the whole
    batch would have left it.

    Args:
        rows: of this loop.
        total: how many rows the whole batch has.
        states: the generator's state before each step, shared by the loops of one batch.
    """

    def __init__(self, rows: slice, total: int, states: list[Tensor]) -> None:
        self._rows = rows
        self._total = total
        self._states = states
        self._step = 0

    def draw(self, probabilities: Tensor) -> Tensor:
        """See `Draws`."""
        device = probabilities.device
        if not self._states:
            self._states.append(get_state(device))
        whole = torch.ones(self._total, probabilities.shape[1], dtype=probabilities.dtype, device=device)
        whole[self._rows] = probabilities
        set_state(self._states[self._step], device)
        tokens = _multinomial(whole)[self._rows]
        self._step += 1
        if self._step == len(self._states):
            self._states.append(get_state(device))
        set_state(self._states[-1], device)
        return tokens


def _multinomial(probabilities: Tensor) -> Tensor:
    return torch.multinomial(probabilities, num_samples=1).squeeze(1)


def get_state(device: torch.device) -> Tensor:
    """The state of torch's generator for a device."""
    return _generator(device).get_state()


def set_state(state: Tensor, device: torch.device) -> None:
    """Put torch's generator for a device into a state."""
    _generator(device).set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
