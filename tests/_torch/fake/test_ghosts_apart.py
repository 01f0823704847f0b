from __future__ import annotations

import pytest
import torch

from partita._torch.fake.ghosts_apart import ghosts_kept_apart
from partita.errors import CheckpointError


def test_what_is_computed_from_ghosts_alone_or_from_tensors_alone_is_computed() -> None:
    ghost, here = torch.empty(2, device="meta"), torch.ones(2, requires_grad=True)
    with ghosts_kept_apart([here]):
        assert ((ghost * torch.tensor(2.0)).half() + ghost).is_meta
        assert torch.equal(here.detach() + here, torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_ghost_and_a_tensor_that_is_there_do_not_meet(device: str) -> None:
    """Without the block a product of both is a ghost."""
    ghost, here = torch.empty(2, 2, device="meta"), torch.ones(2, 2, device=device)
    with ghosts_kept_apart([here]):
        doubled = here * 2
        for take in (lambda: doubled @ ghost, lambda: ghost.copy_(here), lambda: torch.cat([ghost, here])):
            with pytest.raises(CheckpointError, match="takes a tensor of this stage and one of another"):
                take()
