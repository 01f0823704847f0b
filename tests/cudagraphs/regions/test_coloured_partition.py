from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from partita.cudagraphs.regions.coloured_partition import in_rounds

FREE = "free"


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[list[int]]]:
    colours = draw(st.lists(st.sampled_from(["out", "in", FREE]), min_size=1, max_size=14))
    count = len(colours)
    edges = [
        draw(st.lists(st.integers(node + 1, count - 1), unique=True, max_size=3)) if node + 1 < count else []
        for node in range(count)
    ]
    return colours, edges


def longest_alternation(colours: list[str], edges: list[list[int]]) -> int:
    """How many runs of "in" the worst path has: no division into rounds has fewer."""
    most = [0] * len(colours)  # "in" runs on the worst path to this node, and the colour that it ends in
    best: dict[tuple[int, str], int] = {}
    for node, colour in enumerate(colours):
        for last in ("out", "in") if colour == FREE else (colour,):
            before = [
                best[source, other] + (other != last and last == "in")
                for source in range(node)
                if node in edges[source]
                for other in ("out", "in")
                if (source, other) in best and (colour != FREE or other == last)
            ]
            if colour == FREE and not before:
                continue
            best[node, last] = max(before, default=int(last == "in"))
        most[node] = max((best.get((node, last), 0) for last in ("out", "in")), default=0)
    return max(most, default=0)


@given(graphs())
def test_no_edge_leads_to_an_earlier_round(graph: tuple[list[str], list[list[int]]]) -> None:
    colours, edges = graph
    round_of = in_rounds(colours, edges, first="out", neutral=FREE)
    assert all(number >= 0 for number in round_of)
    assert all(round_of[node] <= round_of[after] for node in range(len(colours)) for after in edges[node])


@given(graphs())
def test_a_round_has_one_colour(graph: tuple[list[str], list[list[int]]]) -> None:
    colours, edges = graph
    round_of = in_rounds(colours, edges, first="out", neutral=FREE)
    for number in set(round_of):
        members = {colour for colour, mine in zip(colours, round_of, strict=True) if mine == number}
        assert len(members - {FREE}) <= 1


@given(graphs())
def test_there_are_no_more_rounds_than_some_path_needs(graph: tuple[list[str], list[list[int]]]) -> None:
    colours, edges = graph
    round_of = in_rounds(colours, edges, first="out", neutral=FREE)
    captured = {number for colour, number in zip(colours, round_of, strict=True) if colour == "in"}
    assert len(captured) == longest_alternation(colours, edges)


def test_a_node_without_a_colour_takes_no_part() -> None:
    assert in_rounds([None, "in"], [[], []], first="out", neutral=FREE) == [-1, 0]


def test_three_colours_take_turns_by_the_earliest_ready_node() -> None:
    # a0 -> b1 -> a2, c3 alone: c waits until a and b are through
    assert in_rounds(["a", "b", "a", "c"], [[1], [2], [], []], first="x", neutral=FREE) == [0, 1, 2, 3]


def test_a_free_node_goes_with_its_first_user() -> None:
    colours = ["out", FREE, "in"]
    assert in_rounds(colours, [[2], [2], []], first="out", neutral=FREE) == [0, 1, 1]
