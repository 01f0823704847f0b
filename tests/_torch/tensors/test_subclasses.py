from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from partita._torch.tensors.subclasses import (
    inner_tensors,
    innermost_tensors,
    is_plain_tensor,
    read_like,
    untransformed,
    with_class_of,
)


def test_parameters_and_fakes_are_plain_and_wrappers_are_not() -> None:
    with FakeTensorMode():
        assert is_plain_tensor(torch.ones(1))
    assert is_plain_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not is_plain_tensor(TwoTensor(torch.ones(1), torch.ones(1)))
    assert not is_plain_tensor(1.0)


def test_a_wrapper_has_inner_tensors() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    inner = inner_tensors(TwoTensor(first, second))
    assert inner is not None
    assert [one is other for one, other in zip(inner, (first, second), strict=True)] == [True, True]
    assert inner_tensors(first) is None
    wrapped = innermost_tensors(TwoTensor(TwoTensor(first, second), TwoTensor(second, first)))
    assert [id(one) for one in wrapped] == [id(one) for one in (first, second, second, first)]
    assert innermost_tensors(first) == [first]


def test_memory_is_read_lazily_conjugate_or_negative_as_another_tensor_reads_it() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, negative = x.conj(), x.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    assert read_like(conjugate, x).tolist() == [1 - 2j, 3 + 4j]
    assert read_like(negative, x.imag).tolist() == [-2.0, 4.0]
    assert read_like(x, x) is x


def test_what_transforms_have_wrapped_is_the_very_tensor() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    inner = []

    def total(wrapped: torch.Tensor) -> torch.Tensor:
        inner.append(untransformed(wrapped))
        return wrapped.sum()

    torch.func.vmap(total)(weight)
    torch.func.grad(total)(weight)
    torch.func.grad(lambda outer: torch.func.vmap(total)(outer).sum())(weight)
    total(weight)
    assert len(inner) == 4
    assert all(one is weight for one in inner)


class Labelled(torch.nn.Parameter):
    label: str


def test_a_class_without_operators_of_its_own_is_taken_over_with_its_attributes() -> None:
    weight, memory = Labelled(torch.ones(2)), torch.nn.Parameter(torch.empty(2, device="meta"))
    weight.label = "scales"
    other = with_class_of(weight, memory)
    assert isinstance(other, Labelled)
    assert (other.label, other.is_meta, other.requires_grad) == ("scales", True, True)
    assert with_class_of(torch.nn.Parameter(torch.ones(2)), memory) is memory
    assert with_class_of(torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))), memory) is memory
    assert with_class_of(torch.nn.UninitializedParameter(), memory) is memory
