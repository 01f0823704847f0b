"""A simulated step as a timeline."""

from __future__ import annotations

from partita.planning import Action, Simulation
from partita.planning.simulating.simulate import Span
from partita.reporting.step.data import Timeline, TimelineSpan

__all__ = ["action_span", "simulation_timeline"]


def simulation_timeline(
    simulation: Simulation, title: str = "Simulated", *, transfers: bool = False
) -> Timeline:
    """Return what each rank computes in a simulated step.

    Args:
        simulation: the step.
        title: of the timeline.
        transfers: whether messages that take time are in it too, at the rank that sends them, and what
            gathers parameters or sums gradients over replicas.
    """
    spans = [_compute(span) for span in simulation.spans]
    if transfers:
        beside = (*simulation.transfers, *simulation.collectives)
        spans += [_transfer(span) for span in beside if span.end_s > span.start_s]
    bubble = min(1.0, max(0.0, simulation.bubble))  # sums of floats may leave a trace beyond either end
    return Timeline(title, tuple(spans), simulation.makespan_s, bubble)


def action_span(rank: int, action: Action, start_s: float, end_s: float) -> TimelineSpan:
    """Return one action of a rank as a timeline shows it."""
    stage = action.stage if action.stage >= 0 else None
    return TimelineSpan(rank, str(action), action.kind.value, stage, action.microbatch, start_s, end_s)


def _compute(span: Span) -> TimelineSpan:
    return action_span(span.rank, span.action, span.start_s, span.end_s)


def _transfer(span: Span) -> TimelineSpan:
    action = span.action
    return TimelineSpan(
        span.rank, str(action), "comm", action.stage, action.microbatch, span.start_s, span.end_s
    )
