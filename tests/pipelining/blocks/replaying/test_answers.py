"""What stands for the results of a call on stages that replay it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from partita.errors import ExecutionError
from partita.pipelining.blocks.replaying.answers import NewTensor, Opaque, picklable


def test_what_can_not_be_sent_is_kept_in_sets_and_lists_as_itself() -> None:
    """A model that collects the handles of its hooks removes the one that it means."""
    first, second = Opaque("RemovableHandle"), Opaque("RemovableHandle")
    handles = {first, second}
    assert len(handles) == 2
    ordered = [first, second]
    ordered.remove(second)
    assert ordered[0] is first
    with pytest.raises(ExecutionError, match="uses 'remove' of a RemovableHandle that an earlier stage"):
        first.remove()
    assert pickle.loads(pickle.dumps(first)).what == copy.copy(first).what == "RemovableHandle"


def test_new_tensors_are_equal_where_they_look_alike() -> None:
    looks = NewTensor.of(torch.ones(2, 3).t())
    assert looks == NewTensor((3, 2), (1, 3), torch.float32) == pickle.loads(pickle.dumps(looks))
    assert hash(looks) == hash(NewTensor.of(torch.zeros(2, 3).t()))
    assert (looks.ghost().shape, looks.ghost().stride()) == ((3, 2), (1, 3))


def test_of_a_node_of_autograd_the_name_is_known_elsewhere() -> None:
    node = picklable((torch.ones(2, requires_grad=True) * 2).grad_fn, torch.device("cpu"))
    there = pickle.loads(pickle.dumps(node))
    assert there.name() == "MulBackward0"
    with pytest.raises(ExecutionError, match="uses 'register_hook' of a MulBackward0 that an earlier stage"):
        there.register_hook(print)


def test_nothing_stands_in_for_a_sparse_tensor() -> None:
    looks = NewTensor.of(torch.eye(2).to_sparse())
    with pytest.raises(
        ExecutionError, match=r"makes or takes a sparse or nested tensor \(2, 2\) before a cut"
    ):
        looks.ghost()


def test_nothing_stands_in_for_a_quantised_tensor() -> None:
    """Torch's list of all its backends stood in the error."""
    looks = NewTensor((2, 3), (3, 1), torch.quint8)
    with pytest.raises(ExecutionError, match=r"a quantised tensor \(2, 3\) \(quint8\) before a cut"):
        looks.ghost()
