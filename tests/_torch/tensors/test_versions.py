from __future__ import annotations

import torch

from partita._torch.tensors.versions import same_versions, times_written


def test_writes_to_a_tensor_and_to_its_views_are_counted() -> None:
    tensor = torch.zeros(3)
    before = times_written(tensor)
    tensor.add_(1)
    tensor[0].mul_(2)
    assert times_written(tensor) == before + 2


def test_where_torch_does_not_count_it_is_zero() -> None:
    with torch.inference_mode():
        assert times_written(torch.zeros(3)) == 0


def test_writes_in_the_block_are_not_counted() -> None:
    seen, unseen = torch.zeros(2), torch.zeros(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    with same_versions([unseen, uncounted]):
        unseen.fill_(1.0)
        seen.fill_(1.0)
    assert (times_written(seen), times_written(unseen)) == (1, 0)
    assert unseen.tolist() == [1.0, 1.0]
