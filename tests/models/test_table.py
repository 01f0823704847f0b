"""The table of architectures is honest about what went wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import models_table
from tools.models import page as pages
from tools.models.column import with_compiled
from tools.models.row import CELLS, Row
from tools.models.zoo import PARTS, ZOO

FIRST, SECOND = (tuple(architecture.name for architecture in part) for part in PARTS)


def _row(name: str, **cells: str) -> Row:
    row = Row(name, "decoder", "Model", cells=dict.fromkeys(CELLS, "") | cells, torch_own="equal")
    row.batch, row.frontend, row.compiled = "open", "export", "equal" if name in FIRST else ""
    return row


@pytest.fixture
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "version", lambda name: "1.2.3")


def test_names_in_the_zoo_are_unique() -> None:
    assert len({architecture.name for architecture in ZOO}) == len(ZOO)
    assert len(FIRST) >= 100
    assert len(SECOND) >= 60


def test_no_model_of_the_second_part_is_in_the_first() -> None:
    first, second = ({architecture.model for architecture in part} for part in PARTS)
    adapted = {architecture.model for architecture in PARTS[1] if architecture.family == "peft"}
    assert not first & (second - adapted)


@pytest.mark.usefixtures("_versions")
def test_the_page_counts_what_passed_and_says_why_the_rest_did_not() -> None:
    text = pages.page([_row(FIRST[0]), _row(FIRST[1], **{"4 eval": "ValueError: odd | number"})])
    assert "**1 of 2 are equal in everything" in text
    assert f"- **{FIRST[1]}** (4 eval): `ValueError: odd / number`" in text
    assert f"| {FIRST[0]} | `Model` | export | equal |" in text
    assert "torch 1.2.3, transformers 1.2.3" in text


@pytest.mark.usefixtures("_versions")
def test_the_page_says_why_compiled_stages_are_not_equal() -> None:
    row = _row(FIRST[0])
    row.compiled = "AssertionError: ZBVZeroBubble: loss: differs"
    text = pages.page([row, _row(FIRST[1])])
    assert "| equal | **no** | equal |" in text
    assert "2 of 2 are equal in everything, 1 with compiled stages (0 of them to the uncut" in text
    assert f"- **{FIRST[0]}** (compiled): `AssertionError: ZBVZeroBubble: loss: differs`" in text


@pytest.mark.usefixtures("_versions")
def test_the_column_of_compiled_stages_is_put_into_a_page_and_replaced_there() -> None:
    rows = [_row(FIRST[0]), _row(FIRST[1], **{"4 eval": "ValueError: odd"}), _row(SECOND[0])]
    words = ["equal", "AssertionError: loss: differs"]
    old = pages.page(rows)
    for row, word in zip(rows, words, strict=False):
        row.compiled = word
    made = with_compiled(old, {row.name: row for row in rows})
    expected = pages.page(rows)
    legend = f"{pages.compiled_text()}. Made with {pages.versions()} |"
    assert made == expected.replace(f"{pages.compiled_text()} |", legend)
    assert with_compiled(made, {row.name: row for row in rows}) == made
    unknown = with_compiled(made, {FIRST[0]: rows[0]})
    assert (
        f"| {FIRST[1]} | `Model` | export | equal | equal | equal | equal | **no** | equal | not run |"
        in unknown
    )
    assert "1 with compiled stages (0 of them to the uncut model compiled), of 1 that were run" in unknown


@pytest.mark.usefixtures("_versions")
def test_what_torch_cuts_elsewhere_is_not_said_to_differ() -> None:
    row = _row(FIRST[0])
    row.torch_own = "AssertionError: cut in 5, not 2"
    assert "| equal | cut in 5 |" in pages.page([row])
    row.torch_own = "AssertionError: outputs differ"
    assert "| equal | differs |" in pages.page([row])


@pytest.mark.usefixtures("_versions")
def test_the_second_part_tells_a_refusal_from_a_difference() -> None:
    refused = _row(SECOND[0], **{"2 train": "CaptureError: can't"})
    differing = _row(SECOND[1], **{"2 train": "AssertionError: batch of 3: VerificationFailed: not equal"})
    text = pages.page([_row(FIRST[0]), refused, differing])
    assert f"| {SECOND[0]} | `Model` | export | **refused** | equal |" in text
    assert f"| {SECOND[1]} | `Model` | export | **differs** | equal |" in text
    assert "**1 of 1 are equal" in text
    assert "**0 of 2 are equal" in text


@pytest.mark.usefixtures("_versions")
def test_the_page_names_no_path_of_the_machine_that_made_it() -> None:
    text = pages.page(
        [_row(FIRST[0], **{"2 step": "at x = y  # /home/me/site-packages/transformers/models/a/b.py:3"})]
    )
    assert "/home/me" not in text
    assert "…/a/b.py:3" in text


def test_a_row_whose_process_dies_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'Segmentation fault' >&2\nexit 139\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    row = models_table.run_row(ZOO[0], limit=60)
    assert not row.passed
    assert set(row.cells.values()) == {"exit status 139: Segmentation fault"}


def test_a_row_that_takes_too_long_keeps_what_it_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = '{"name": "a", "family": "decoder", "model": "Model", "cells": {"2 train": ""}}'
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{done}'\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    row = models_table.run_row(ZOO[0], limit=1)
    assert row.cells["2 train"] == ""
    assert row.cells["4 step"] == "not done after 1 s"
