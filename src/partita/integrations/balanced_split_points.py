"""Split points that give each stage about as many bytes of parameters as the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from partita.planning import CostModel, Unit, plan_stages

__all__ = ["balanced_split_points"]


def balanced_split_points(model: nn.Module, stages: int, whole: Collection[str] = ()) -> list[str]:
    """Return the names of the modules at which every stage but the first begins.

    Parameters count where they are first defined, so a tied one counts once.

    Args:
        whole: the names of classes whose modules stay in one piece.

    Raises:
        InfeasiblePlan: there are fewer modules with parameters of their own than stages.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 8))
    >>> balanced_split_points(model, 2)
    ['2']
    """
    units = tuple(_units(model, frozenset(whole), "", set(), set()))
    plan = plan_stages(CostModel(units, (0,) * (len(units) - 1)), stages, schedule="GPipe")
    return [stage.units[0] for stage in plan.stages[1:]]


def _units(
    module: nn.Module, whole: frozenset[str], path: str, modules: set[int], parameters: set[int]
) -> Iterator[Unit]:
    """The modules that are not divided and have parameters of their own; their costs are bytes."""
    if id(module) in modules:
        return
    modules.add(id(module))
    if type(module).__name__ not in whole and any(True for _ in module.children()):
        for name, child in module.named_children():
            yield from _units(child, whole, f"{path}.{name}" if path else name, modules, parameters)
        return
    own = [parameter for parameter in module.parameters() if id(parameter) not in parameters]
    parameters.update(map(id, own))
    size = sum(parameter.numel() * parameter.element_size() for parameter in own)
    if size:
        yield Unit(path, float(size), 0.0, parameter_bytes=size)
