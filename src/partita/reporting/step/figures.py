"""The key figures that every report of a pipelined run starts with."""

from __future__ import annotations

from partita.reporting.drawing.units import format_number, format_seconds, format_share
from partita.reporting.step.data import Figure, Timeline

__all__ = ["key_figures"]


def key_figures(
    *,
    parameter_difference: float,
    bitwise_equal: bool,
    pipelined_samples_s: float,
    reference_samples_s: float,
    measured: Timeline,
    simulated: Timeline,
    tokens_a_sample: int | None = None,
) -> tuple[Figure, ...]:
    """Return the key figures: the proof first, then the speed, then how well the ranks were used.

    Args:
        parameter_difference: largest absolute difference over all parameters after training.
        bitwise_equal: whether all bits of all parameters were compared and are equal. A difference of 0.0
            does not say so: 0.0 and -0.0 do not differ, nor does what was not compared.
        pipelined_samples_s: samples a second of the pipelined run.
        reference_samples_s: samples a second of the uncut run.
        measured: one step as it ran.
        simulated: the same step as simulated.
        tokens_a_sample: for the figure of tokens a second; None: there is none.
    """
    equal = parameter_difference == 0
    note = "equal in value" if equal else "pipelined and uncut differ"
    proof = Figure(
        "Largest parameter difference",
        float(parameter_difference),
        note="equal bit for bit" if equal and bitwise_equal else note,
        tone="good" if equal else "bad",
    )
    ratio = pipelined_samples_s / reference_samples_s if reference_samples_s else None
    compared = "" if ratio is None else f"{ratio:.2f} times the uncut model"
    tokens = (
        ()
        if tokens_a_sample is None
        else (_tokens(pipelined_samples_s, reference_samples_s, tokens_a_sample),)
    )
    return (
        proof,
        *tokens,
        Figure("Pipelined speed", float(pipelined_samples_s), "samples/s", compared),
        Figure("Uncut speed", float(reference_samples_s), "samples/s", "one process, same microbatches"),
        Figure("Bubble, measured", format_share(measured.bubble), "", _step(measured)),
        Figure("Bubble, simulated", format_share(simulated.bubble), "", _step(simulated)),
    )


def _step(timeline: Timeline) -> str:
    return f"step of {format_seconds(timeline.makespan_s)}"


def _tokens(pipelined_samples_s: float, reference_samples_s: float, each: int) -> Figure:
    note = f"{each} a sample; uncut {format_number(reference_samples_s * each)} tokens/s"
    return Figure("Pipelined tokens", float(pipelined_samples_s * each), "tokens/s", note)
