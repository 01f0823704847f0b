"""Exactly one source says where a model is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from partita.errors import ArgumentError
from partita.listing import listed
from partita.pipelining.frontends.cuts.annotations import split_points
from partita.pipelining.frontends.cuts.cuts import Place, SplitPoint, SplitSpec
from partita.pipelining.frontends.cuts.plan_request import PlanRequest

__all__ = ["check_marks", "check_sources", "module_cuts"]


def module_cuts(
    module: nn.Module, split_spec: SplitSpec | None, request: PlanRequest, others: list[str]
) -> Mapping[Place, Sequence[SplitPoint]] | PlanRequest:
    """Return the split points of ``frontend="modules"``, or what to plan the cuts from.

    Raises:
        ArgumentError: no source or several, or an argument among ``others`` that only graphs have.
    """
    if others:
        raise ArgumentError(
            f'frontend="modules" does not take {others[0]}: it runs the model\'s own code and has no graph; '
            "give stages=N, a split_spec, or annotate_split_points"
        )
    annotations = split_points(module)
    sources = {"split_spec": split_spec, "stages": request.stages, "plan": request.plan}
    named = [name for name, value in sources.items() if value is not None]
    check_sources(named, list(annotations))
    check_marks(named, [], list(annotations))
    if annotations:
        return dict(annotations.items())
    if split_spec is None:
        return request
    return {place: (point,) for place, point in split_spec.items()}


def check_sources(named: list[str], annotated: list[str]) -> None:
    """Check that no two sources of the cuts are there, as far as that is known before a graph is.

    Args:
        named: the arguments of `pipeline` that say where.
        annotated: the names of annotated submodules.

    Raises:
        ArgumentError: there is more than one.
    """
    if len(named) > 1:
        raise ArgumentError(f"pipeline got {' and '.join(named)}: give one of them, each says where to cut")
    if named and annotated:
        raise _two_sources(annotated, f"pipeline got {named[0]}")


def check_marks(named: list[str], marks: list[int], annotated: list[str]) -> None:
    """Check that there is one source of the cuts, with the marks that the graph has.

    Args:
        marks: where ``forward`` is marked.

    Raises:
        ArgumentError: there is none, or more than one.
    """
    if not named and not marks and not annotated:
        raise ArgumentError(
            "pipeline does not know where to cut: give stages=N, a split_spec, a split_policy or a plan, "
            "annotate_split_points, or call pipe_split() in the model's forward"
        )
    if annotated and marks:
        raise _two_sources(annotated, "its forward calls pipe_split()")
    if named == ["split_policy"] and not marks:
        raise ArgumentError(
            "the split_policy returned a graph without pipe_split marks: put one where a stage ends"
        )
    if marks and named not in ([], ["split_policy"]):
        raise ArgumentError(f"the model calls pipe_split() and pipeline got {named[0]}: use one of the two")


def _two_sources(annotated: list[str], other: str) -> ArgumentError:
    return ArgumentError(
        f"the model is annotated with split points at {listed(annotated)} and {other}: use one of the two "
        "(clear_split_points(model) takes the annotations off)"
    )
