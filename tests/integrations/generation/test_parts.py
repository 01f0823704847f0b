"""A batch in several parts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'partita[hf]'")

from transformers import LogitsProcessor, LogitsProcessorList

from partita.errors import ArgumentError
from partita.integrations.generation.parts import cut_batch, with_own_processors


def test_what_has_a_row_for_each_prompt_is_cut_and_no_option_of_generation() -> None:
    rows = torch.arange(6).reshape(3, 2)
    options = {"attention_mask": rows, "eos_token_id": torch.tensor([1, 2, 3]), "max_new_tokens": 4}
    first, last = cut_batch(rows, options, 2, 3)
    assert (first.rows, last.rows) == (slice(0, 2), slice(2, 3))
    assert torch.equal(last.inputs, rows[2:])
    assert torch.equal(first.options["attention_mask"], rows[:2])
    assert first.options["eos_token_id"] is options["eos_token_id"]


def test_rows_of_several_sequences_a_prompt_keep_their_numbers() -> None:
    options = {"prefix_allowed_tokens_fn": lambda row, _: [row], "num_return_sequences": 3}
    _, last = cut_batch(torch.ones(4, 2), options, 2, 4)
    assert last.options["prefix_allowed_tokens_fn"](1, torch.ones(2)) == [7]


class _Holds(LogitsProcessor):
    def __init__(self, value: Any) -> None:
        self.value = value


def test_modules_in_processors_are_shared_and_what_cannot_be_copied_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    processors = LogitsProcessorList([_Holds(module)])
    own = with_own_processors({"logits_processor": processors})["logits_processor"]
    assert type(own) is LogitsProcessorList
    assert own[0] is not processors[0]
    assert own[0].value is module
    with pytest.raises(ArgumentError, match=r"_Holds in logits_processor can't be copied.*without in_flight"):
        with_own_processors({"logits_processor": LogitsProcessorList([_Holds(threading.Lock())])})
