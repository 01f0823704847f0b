from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from partita.reporting import outermost_modules, summarise_modules
from partita.reporting.plan.modules import without_common_path

names = st.builds(
    lambda prefix, number: f"{prefix}.{number}" if prefix else f"m{number}",
    st.sampled_from(["", "layers", "h.blocks"]),
    st.integers(0, 4),
)


def written_out(summary: tuple[str, ...]) -> list[str]:
    found = []
    for name in summary:
        prefix, _, last = name.rpartition(".")
        first, dash, end = last.partition("-")
        found.extend(f"{prefix}.{n}" for n in range(int(first), int(end) + 1)) if dash else found.append(name)
    return found


@given(st.lists(names))
def test_a_summary_written_out_is_the_list(given_names: list[str]) -> None:
    assert written_out(summarise_modules(given_names)) == given_names


def test_only_numbers_that_count_up_become_a_range() -> None:
    assert summarise_modules(["l.0", "l.1", "l.3", "l.2", "k.3"]) == ("l.0-1", "l.3", "l.2", "k.3")


def test_a_number_without_a_parent_is_a_name() -> None:
    assert summarise_modules(["0", "1", ""]) == ("0", "1", "")


def test_a_module_inside_one_stage_stands_for_its_parts() -> None:
    stages = [["blocks.0.norm", "blocks.0.mlp.0", "blocks.0"], ["blocks.1.norm", "head"]]
    assert outermost_modules(stages) == [("blocks.0",), ("blocks.1", "head")]


def test_a_module_that_two_stages_share_is_named_by_its_parts() -> None:
    stages = [["embed", "block.norm", "block"], ["block.mlp", "block", "head"]]
    assert outermost_modules(stages) == [("embed", "block.norm"), ("block.mlp", "head")]


def test_the_common_path_of_names_is_whole_modules() -> None:
    assert without_common_path([["a.b.c1", "a.b.c2"], ["a.b.c3.d"]]) == ("a.b", [("c1", "c2"), ("c3.d",)])
    assert without_common_path([["ab", "ac"]]) == ("", [("ab", "ac")])
    assert without_common_path([["a.b"], ["c.b"]]) == ("", [("a.b",), ("c.b",)])
    assert without_common_path([[]]) == ("", [()])


@given(st.lists(st.lists(names, max_size=3), max_size=3))
def test_the_common_path_and_the_rest_are_the_names(stages: list[list[str]]) -> None:
    around, rest = without_common_path(stages)
    assert [[f"{around}.{name}" if around else name for name in one] for one in rest] == stages
