"""The figures of the papers, row by row: Qi et al. on zero bubbles and on controllable memory, and DualPipe's
README.

Times are in microseconds. A bubble is ``1 - m (F + I + W) / time``; "by span", the time is the longest of a
single rank.
"""

from __future__ import annotations

import pytest

from partita.planning import Cluster, Schedule, Simulation, StageCost, get_schedule, simulate

Row = tuple[int, int, float, float, float, float]
"""p, m, F, I, W, comm"""

ZERO_BUBBLE = [
    # p, m, F, I, W, comm, and the bubbles of 1F1B, ZB-H1, ZB-H2 and ZB-2p, the last two by span
    (8, 24, 18522, 18086, 9337, 601, 0.2431, 0.1585, 0.1083, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 0.1985, 0.1242, 0.0837, 0.0039),
    (8, 64, 18546, 18097, 9321, 762, 0.1240, 0.0674, 0.0444, 0.0026),
    (8, 24, 29718, 29444, 19927, 527, 0.2347, 0.1323, 0.0698, 0.0029),
    (8, 32, 29802, 29428, 19530, 577, 0.1898, 0.1045, 0.0559, 0.0022),
    (8, 64, 29935, 29621, 19388, 535, 0.1091, 0.0554, 0.0294, 0.0010),
    (16, 48, 11347, 11248, 8132, 377, 0.2552, 0.1397, 0.0672, 0.0066),
    (16, 64, 11307, 11254, 8101, 379, 0.2082, 0.1088, 0.0516, 0.0054),
    (16, 128, 11325, 11308, 8109, 378, 0.1251, 0.0576, 0.0266, 0.0028),
    (32, 96, 10419, 10207, 7715, 408, 0.2646, 0.1421, 0.0641, 0.0038),
    (32, 128, 10408, 10204, 7703, 408, 0.2168, 0.1106, 0.0490, 0.0029),
    (32, 256, 10402, 10248, 7698, 460, 0.1352, 0.0594, 0.0257, 0.0018),
]
SOME_DEAR = [
    pytest.param(row, marks=[pytest.mark.dear] if row[0] == 32 or row[1] == 128 else [])
    for row in ZERO_BUBBLE
]
ZB_V = [
    # p, m, F, I, W of a chunk, comm, and the bubble by span
    (16, 48, 14407, 14380, 9676, 1610, 0.0697),
    (16, 64, 14412, 14393, 9688, 1621, 0.0533),
    (16, 128, 14316, 14306, 9639, 1619, 0.0274),
    (24, 72, 6763, 6969, 5251, 755, 0.0638),
    (24, 96, 6783, 6984, 5259, 758, 0.0483),
    (24, 192, 6785, 6990, 5260, 770, 0.0250),
    (32, 96, 9458, 9748, 7288, 879, 0.0593),
    (32, 128, 9469, 9744, 7306, 892, 0.0451),
    (32, 256, 9447, 9644, 7193, 887, 0.0236),
]
CONTROLLABLE_MEMORY = [
    # p, m, and the time, the bubble and the peak of V-Half and of V-Min
    (4, 8, (53, 0.0943, 3), (59, 0.1864, 2)),
    (8, 24, (161, 0.1056, 5), (171, 0.1579, 4)),
    (8, 32, (209, 0.0813, 5), (219, 0.1233, 4)),
    (16, 48, (329, 0.1246, 9), (347, 0.1700, 6)),
    (16, 64, (425, 0.0965, 9), (443, 0.1332, 6)),
]


def step(name: str, row: Row, chunks: int = 1) -> Simulation:
    p, m, forward, input_s, weight, comm = row
    costs = [StageCost(forward, input_s + weight, input_s, weight, activation_bytes=1)] * (chunks * p)
    cluster = Cluster(p, latency_s=comm)
    return simulate(get_schedule(name)(chunks * p, m, p, costs=costs, cluster=cluster), costs, cluster)


def ids(rows: list[tuple[object, ...]]) -> list[str]:
    return [f"{row[0]} ranks, {row[1]} microbatches, F {row[2]}" for row in rows]


@pytest.mark.parametrize("row", SOME_DEAR, ids=ids(ZERO_BUBBLE))
def test_zero_bubble_pipeline_parallelism(row: tuple[float, ...]) -> None:
    *costs, one_f_one_b, h1, h2, automatic = row
    assert round(step("1F1B", costs).bubble, 4) == one_f_one_b  # type: ignore[arg-type]
    assert round(step("ZBH1", costs).bubble, 4) == h1  # type: ignore[arg-type]
    assert round(step("ZBH2", costs).span_bubble, 4) == h2  # type: ignore[arg-type]
    assert step("ZB2p", costs).span_bubble <= automatic + 0.0005  # type: ignore[arg-type]


@pytest.mark.parametrize("row", SOME_DEAR, ids=ids(ZERO_BUBBLE))
def test_zb_2p_in_twice_the_memory_of_1f1b(row: tuple[float, ...]) -> None:
    """A layer keeps 34 h + 5 a s bytes for a token, of which W needs 32 h (the paper, section 4)."""
    p, m, forward, input_s, weight, comm = row[:6]
    hidden, heads = {8: (4096, 32) if forward > 20000 else (2304, 24), 16: (5120, 40), 32: (6144, 48)}[int(p)]
    kept = 34 * hidden + 5 * heads * 1024
    cost = StageCost(
        forward,
        input_s + weight,
        input_s,
        weight,
        activation_bytes=kept,
        weight_activation_bytes=32 * hidden,
    )
    costs, cluster = [cost] * int(p), Cluster(int(p), latency_s=comm)
    schedule = get_schedule("ZB2p")(int(p), int(m), costs=costs, cluster=cluster)
    result = simulate(schedule, costs, cluster)
    assert result.span_bubble <= row[-1] + 0.0005
    assert max(result.peak_bytes) <= 2 * p * kept


@pytest.mark.parametrize("row", ZB_V, ids=ids(ZB_V))
def test_zb_v_is_never_worse_than_published(row: tuple[float, ...]) -> None:
    *costs, published = row
    assert round(step("ZBVZeroBubble", costs, chunks=2).span_bubble, 4) <= published  # type: ignore[arg-type]


@pytest.mark.parametrize(("p", "m", "half", "least"), CONTROLLABLE_MEMORY)
def test_pipeline_parallelism_with_controllable_memory(
    p: int, m: int, half: tuple[int, float, int], least: tuple[int, float, int]
) -> None:
    for name, (span, bubble, peak) in (("VHalf", half), ("VMin", least)):
        result = step(name, (p, m, 1.0, 1.0, 1.0, 0.0), chunks=2)
        assert result.span_s == result.makespan_s == span
        assert round(result.span_bubble, 4) == bubble
        assert max(result.peak_bytes) == 2 * peak  # two chunks make what a rank of 1F1B holds of a microbatch


@pytest.mark.parametrize("p", range(2, 17))
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_v_half_and_v_min_for_every_number_of_ranks(p: int, times: int) -> None:
    """The papers' peaks, and at most the idle time that the tables follow."""
    m = times * p
    for name, peak, idle in (
        ("VHalf", (p + 2) // 2, max(3 * p - (4 if p % 2 else 7), 1)),
        ("VMin", (p + 4) // 3, 4 * p - (5 if p % 3 else 7)),
    ):
        result = step(name, (p, m, 1.0, 1.0, 1.0, 0.0), chunks=2)
        assert max(result.peak_bytes) <= 2 * peak
        assert result.makespan_s <= 6 * m + idle


@pytest.mark.parametrize(
    ("p", "m", "chunks", "bubble"), [(8, 24, 3, 0.1090), (8, 24, 4, 0.0827), (16, 48, 3, 0.1136)]
)
def test_interleaved_1f1b_with_every_dependency(p: int, m: int, chunks: int, bubble: float) -> None:
    row = next(row for row in ZERO_BUBBLE if row[:2] == (p, m))
    if (p, m, chunks) == (8, 24, 4):
        row = ZERO_BUBBLE[3]
    *times, comm = row[2:6]
    forward, input_s, weight = (time / chunks for time in times)
    result = step("Interleaved1F1B", (p, m, forward, input_s, weight, comm), chunks)
    assert round(result.bubble, 4) == bubble


@pytest.mark.parametrize("pp", [4, 8, 16])
def test_what_a_step_takes_beyond_a_full_pipeline(pp: int) -> None:
    """DualPipe's README: (PP-1)(F+B) for 1F1B, (PP-1)(F+B-2W) for ZB1P."""
    m, forward, input_s, weight = 3 * pp, 3.0, 5.0, 2.0
    row = (pp, m, forward, input_s, weight, 0.0)
    full = m * (forward + input_s + weight)
    assert step("1F1B", row).makespan_s - full == (pp - 1) * (forward + input_s + weight)
    assert step("ZBH1", row).makespan_s - full == (pp - 1) * (forward + input_s - weight)


@pytest.mark.parametrize("pp", [4, 8, 16])
@pytest.mark.parametrize("together", [6.0, 8.0, 10.0])
def test_dual_pipe_v_by_its_readme(pp: int, together: float) -> None:
    """(PP/2-1)(F&B + B - 3W) beyond the work of a rank, and PP+1 chunks in memory."""
    forward, input_s, weight = 4.0, 4.0, 2.0
    cost = StageCost(forward, input_s + weight, input_s, weight, activation_bytes=1, overlap_s=together)
    result = simulate(get_schedule("DualPipeV")(pp, 3 * pp), [cost] * pp)
    beyond = (pp / 2 - 1) * (together + input_s + weight - 3 * weight)
    assert result.makespan_s - min(result.busy_s) == beyond
    assert max(result.peak_bytes) == pp + 1


def test_64_ranks_and_512_microbatches_take_what_the_formula_says() -> None:
    result = simulate(get_schedule("1F1B")(64, 512), [StageCost(1.0, 2.0)] * 64)
    assert result.makespan_s == (512 + 63) * 3.0


def test_a_span_is_a_ranks_own_time() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n")
    result = simulate(schedule, [StageCost(1.0, 2.0), StageCost(2.0, 4.0)])
    assert result.makespan_s == 9.0
    assert result.rank_span_s == (9.0, 6.0)
    assert result.span_s == 9.0
    assert result.rank_bubble == (pytest.approx(2 / 3), 0.0)
    assert result.span_bubble == pytest.approx(0.5)
