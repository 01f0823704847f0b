from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.pipelining.models import CASES, NORMED, PLAIN, REGIONS, Case
from tests.pipelining.running import cut
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from partita.capture import capture
from partita.errors import CaptureError
from partita.pipelining import pipeline
from partita.pipelining.frontends.graph.coverage import check_operations, check_state, unused_state
from partita.splitter import split
from partita.verification import verify


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_operation_is_in_one_stage_and_all_state_in_some(case: Case) -> None:
    pipe = cut(case, len(case.after) + 1)
    modules = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    check_state(case.model(), modules)
    inside = [name for piece in pipe._pieces for name in piece.node_names]
    assert len(inside) == len(set(inside))


def test_what_nothing_uses_is_named_with_the_stage_that_holds_it() -> None:
    pipe = cut(NORMED, 4)
    assert pipe.unused == ("unused.weight", "unused.bias", "kept")
    assert "unused: unused.weight, held by stage " in str(pipe.info())
    assert cut(PLAIN, 2).unused == ()


def test_an_operation_in_no_piece_or_in_two_is_an_error() -> None:
    whole = capture(PLAIN.model(), PLAIN.data(2)[0]).module
    pieces = split(whole, lambda node: 0 if node.name == "linear" else 1).pieces
    check_operations(whole, pieces)
    with pytest.raises(CaptureError, match="the operations 'linear' are not in exactly one stage"):
        check_operations(whole, pieces[1:])
    with pytest.raises(CaptureError, match="the operations 'linear' are not in exactly one stage"):
        check_operations(whole, [*pieces, replace(pieces[0])])


def test_regions_are_no_operations() -> None:
    whole = capture(REGIONS.model(), REGIONS.data(2)[0]).module
    check_operations(whole, split(whole, lambda node: 0).pieces)


def test_a_parameter_in_no_stage_is_an_error() -> None:
    pipe = cut(PLAIN, 2)
    with pytest.raises(CaptureError, match=r"no stage holds 'b\.weight', 'b\.bias'"):
        check_state(PLAIN.model(), [pipe.get_stage_module(0)])


def test_a_tied_parameter_counts_as_used_under_all_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    whole = capture(Tied(), (torch.randn(2, 2),)).module
    assert unused_state([whole], whole) == ["b.bias"]


class _Documents(nn.Module):
    """Attends within documents. Only strict mode takes ``len``; it puts functions into the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def same(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return documents[b, q] == documents[b, k]

        mask = create_block_mask(same, len(documents), None, 16, 16, device="cpu")
        out: Tensor = flex_attention(self.queries(x), self.keys(x), x, block_mask=mask)
        return out


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_functions_in_a_strict_trace_are_no_state_and_masks_may_be_cut_from_attention() -> None:
    model = _Documents().eval().requires_grad_(False)
    call = (torch.randn(2, 2, 16, 8), (torch.arange(16) // 5).expand(2, 16))
    pipe = pipeline(model, call, stages=2)
    assert pipe.unused == ()
    assert verify(pipe, model, call, mode="eval").ok
