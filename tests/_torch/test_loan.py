from __future__ import annotations

import torch

from partita._torch.loan import Loan, lend


def test_a_loan_is_returned_with_the_last_view() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    lent = lend(tensor.untyped_storage())
    loan = Loan(lent)
    whole = torch.empty(0).set_(lent, 0, (2, 3), (3, 1))
    del lent
    part = whole[1, 1:]
    del whole
    assert not loan.returned
    part.fill_(9.0)
    assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 9.0, 9.0]]
    del part
    assert loan.returned


def test_a_graph_that_saved_it_has_it() -> None:
    tensor = torch.ones(3)
    lent = lend(tensor.untyped_storage())
    loan = Loan(lent)
    weight = torch.ones(3, requires_grad=True)
    result = (weight * torch.empty(0).set_(lent, 0, (3,), (1,))).sum()
    del lent
    assert not loan.returned
    result.backward()
    assert loan.returned


def test_lent_memory_outlives_its_owner() -> None:
    tensor = torch.full((1000,), 3.0)
    lent = lend(tensor.untyped_storage())
    del tensor
    torch.zeros(1000)
    assert torch.empty(0).set_(lent, 0, (1000,), (1,)).unique().tolist() == [3.0]


def test_memory_of_every_dtype_can_be_lent() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int8):
        tensor = torch.zeros(5, dtype=dtype)
        lent = lend(tensor.untyped_storage())
        assert lent.data_ptr() == tensor.data_ptr()
        assert lent.nbytes() == tensor.untyped_storage().nbytes()
