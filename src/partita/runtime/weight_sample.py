"""A few bits of the weights, which travel with gradients: what shows that copies on ranks have drifted apart.

A learning rate that follows the loss of its own rank, weights that one rank alone has loaded, an optimizer
that rounds at random: gradients stay the same on all ranks, and the weights do not. To compare all of them in
each step would cost as much as the gradients. So each step looks at some numbers of one parameter, of another
one in the next step, and takes a byte from them. What travels may be summed: of each bit it is said whether
it is set, and whether it is clear, so that both are seen where ranks differ, whatever the sum can hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["SAMPLE_FLAGS", "WeightSample", "samples_differ"]

_BITS = 8
SAMPLE_FLAGS = 2 * _BITS
"""Whether each bit is set, and then whether each is clear."""

_NUMBERS = 256
"""How many numbers of a parameter are looked at in one step."""
_PRIME = 251
"""The largest below 2^8. Numbers are often alike, as the gains of a norm are, and as many as a power of two:
of their sum, the lowest byte would not tell ones from zeros.
"""
_GOLDEN = 0x9E3779B1
"""2^32 over the golden ratio: its multiples spread evenly (D. E. Knuth, "The Art of Computer Programming",
volume 3, section 6.4)."""


class WeightSample:
    """Looks at a part of the weights after another.

    Args:
        tensors: the same on every rank; those that are empty, or of a subclass with a memory of its own, are
            passed over.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [
            tensor for tensor in tensors if tensor.numel() and type(tensor.detach()) is torch.Tensor
        ]

    def flags(self, step: int) -> torch.Tensor:
        """Return `SAMPLE_FLAGS` numbers, 0 or 1, of the weights whose turn it is in a step.

        Returns:
            int64, on the device of these weights.
        """
        if not self._tensors:
            return torch.zeros(SAMPLE_FLAGS, dtype=torch.int64, device="cpu")
        turn, number = divmod(step, len(self._tensors))
        numbers = _some_of(self._tensors[number].detach(), turn)
        total = numbers.view(torch.uint8).sum() % _PRIME
        bits = torch.bitwise_right_shift(total, torch.arange(_BITS, device=total.device)) & 1
        return torch.cat((bits, 1 - bits))


def samples_differ(flags: Sequence[float]) -> bool:
    """Return whether the sums over all ranks say that some have other weights.

    >>> samples_differ([2, 0, 2, 0, 2, 0, 2, 0, 0, 2, 0, 2, 0, 2, 0, 2])
    False
    >>> samples_differ([2, 1, 2, 0, 2, 0, 2, 0, 0, 1, 0, 2, 0, 2, 0, 2])
    True
    """
    return any(is_set and is_clear for is_set, is_clear in zip(flags[:_BITS], flags[_BITS:], strict=True))


def _some_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Some numbers of a tensor, contiguous: others in the next turn, the same ones in any memory format."""
    count = tensor.numel()
    every = max(-(-count // _NUMBERS), 1)
    first = _spread(turn, every)
    if tensor.is_contiguous():
        numbers = tensor.view(-1)[first::every]
    else:
        places = torch.arange(first, count, every, device=tensor.device)
        indices: list[torch.Tensor] = []
        for size in reversed(tensor.shape):  # torch.unravel_index takes 29 MB when it is first called
            indices.insert(0, places % size)
            places = places // size
        numbers = tensor[tuple(indices)]
    return numbers.resolve_conj().resolve_neg().contiguous()


def _spread(turn: int, size: int) -> int:
    """A place below ``size``, that is a different one in each turn."""
    return ((turn * _GOLDEN & 0xFFFFFFFF) * size) >> 32
