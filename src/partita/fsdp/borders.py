"""Cutting pipeline stages at FSDP's borders."""

from __future__ import annotations

from typing import Literal

from torch import nn

from partita._torch.distributed.fsdp_marks import is_border, unwrapped_name
from partita.errors import ArgumentError

__all__ = ["split_points_at_fsdp"]


def split_points_at_fsdp(module: nn.Module, num_stages: int | None = None) -> dict[str, Literal["BEGINNING"]]:
    """Return the outermost modules that FSDP gathers and frees: stages that begin there share no shard.

    The root is no border: the model itself, or the module in it that has all of its parameters (a wrapper
    that computes the loss of a sharded model has none). Neither is a sharded module inside a border.

    Args:
        num_stages: choose ``num_stages - 1`` of them such that the stages have nearly equal bytes of
            parameters; by default all are returned.

    Returns:
        From name (as the model has it, without FSDP1's wrappers, and without those of ``torch.compile`` and
        checkpointing around the border) to ``"BEGINNING"``, in the order of the model.

    Raises:
        ArgumentError: there are fewer borders than the stages need.

    >>> from torch import nn
    >>> split_points_at_fsdp(nn.Sequential(nn.Linear(2, 2)))
    {}
    """
    borders: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    total = sum(1 for _ in module.parameters())
    for name, inner in module.named_modules():
        if inner in inside or not is_border(inner):
            continue
        original_name = unwrapped_name(name)
        is_root = total > 0 and sum(1 for _ in inner.parameters()) == total
        if original_name and not is_root:
            borders[original_name] = inner
            inside.update(inner.modules())
    names = list(borders) if num_stages is None else _chosen(module, borders, num_stages)
    return dict.fromkeys(names, "BEGINNING")


def _chosen(module: nn.Module, borders: dict[str, nn.Module], num_stages: int) -> list[str]:
    """The borders nearest to equal shares of the parameters, chosen in order."""
    if num_stages < 1:
        raise ArgumentError(f"num_stages is {num_stages}: a pipeline has at least 1")
    wanted = num_stages - 1
    if len(borders) < wanted:
        raise ArgumentError(
            f"{num_stages} stages need {wanted} borders, and FSDP has {len(borders)}: shard more modules of "
            "their own, or ask for fewer stages"
        )
    before, total = _bytes_before(module, borders)
    names, chosen = list(borders), list[str]()
    start = 0
    for number in range(1, num_stages):
        share = total * number / num_stages
        last = len(names) - (wanted - number)
        index = min(range(start, last), key=lambda place: abs(before[names[place]] - share))
        chosen.append(names[index])
        start = index + 1
    return chosen


def _bytes_before(module: nn.Module, borders: dict[str, nn.Module]) -> tuple[dict[str, int], int]:
    """Bytes of the parameters that stand before each border in the model's order, and of all."""
    begins = {id(border): name for name, border in borders.items()}
    before: dict[str, int] = {}
    seen: set[int] = set()
    total = 0
    for inner in module.modules():
        if id(inner) in begins:
            before[begins[id(inner)]] = total
        for parameter in inner.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                total += parameter.numel() * parameter.element_size()
    return before, total
