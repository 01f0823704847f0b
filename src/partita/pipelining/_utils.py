"""Functions of ``torch.distributed.pipelining._utils`` that programs use."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from partita._torch.containers.pytree import flatten, unflatten
from partita.errors import ScheduleError
from partita.errors import SignatureMismatch as PipeliningMetadataError
from partita.pipelining.interface.pipe_info import PipeInfo
from partita.planning import loop_placement, v_placement

__all__ = [
    "PipeInfo",
    "PipeliningMetadataError",
    "flatten_args",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
]

_PLACEMENTS = {"loop": loop_placement, "v": v_placement}


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """Return the rank of each stage, by `planning.loop_placement` or `planning.v_placement`.

    >>> generate_stage_to_rank_mapping(2, 4, style="v")
    {0: 0, 1: 1, 2: 1, 3: 0}

    Raises:
        ScheduleError: another style than ``loop`` and ``v``, or a V of other than two stages a rank.
    """
    if style not in _PLACEMENTS:
        raise ScheduleError(f"style is {style!r}: give 'loop' or 'v'")
    return dict(enumerate(_PLACEMENTS[style](num_stages, pp_size)))


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """Return the stages of each rank, in order; see `generate_stage_to_rank_mapping`.

    >>> generate_rank_to_stage_mapping(2, 4)
    {0: [0, 2], 1: [1, 3]}
    """
    stages: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages.setdefault(rank, []).append(stage)
    return stages


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """The leaves of nested arguments as a list; with ``detach`` the nested arguments with every tensor
    detached, and their leaves.

    >>> flatten_args((1, {"y": [2, 3]}))
    [1, 2, 3]
    """
    leaves, structure = flatten(args)
    if not detach:
        return leaves
    leaves = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return unflatten(leaves, structure), leaves
