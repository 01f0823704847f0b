"""The user's model as it was when it was cut: stages stay so, whatever is done to it afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

__all__ = ["OriginalModel", "Setting", "is_same_setting"]

_SETTINGS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Setting:
    """An attribute of a module that is a flag, a number or a text.

    Attributes:
        path: of the module; empty for the model itself.
        before: its value when the model was cut.
        now: its value now.
    """

    path: str
    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return _joined(self.path, self.name)


@dataclass(frozen=True, slots=True)
class _Part:
    """A module of the model, with what it was when the model was cut."""

    path: str
    module: ReferenceType[nn.Module]
    training: bool
    settings: Mapping[str, Any]
    children: Mapping[str, ReferenceType[nn.Module]]

    def changed(self, attributes: Mapping[str, Any]) -> Iterator[Setting]:
        for name, before in self.settings.items():
            now = attributes.get(name)
            if now is not before and not is_same_setting(now, before):
                yield Setting(self.path, name, before, now)


class OriginalModel:
    """The model of a pipeline, which it does not keep alive. A copy or pickle knows of none.

    Args:
        model: None: there is none.
        set_by_forward: attributes, by path and name, that its ``forward`` itself sets.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> original = OriginalModel(model)
    >>> model[1].p = 0.0
    >>> [(str(setting), setting.before, setting.now) for setting in original.changed()]
    [('1.p', 0.5, 0.0)]
    """

    def __init__(self, model: nn.Module | None = None, set_by_forward: Collection[str] = ()) -> None:
        modules = {} if model is None else dict(model.named_modules())
        self._parts = [_part(path, module, set_by_forward) for path, module in modules.items()]
        named = () if model is None else model.named_parameters(remove_duplicate=False)
        self._parameters = {name: ref(parameter) for name, parameter in named}

    def __reduce__(self) -> tuple[type[OriginalModel], tuple[()]]:
        return OriginalModel, ()

    def parameter(self, name: str) -> nn.Parameter | None:
        """The parameter that had this name when the model was cut; None: there was none, or it is gone."""
        reference = self._parameters.get(name)
        return None if reference is None else reference()

    def changed(self) -> Iterator[Setting]:
        """The settings that are others now."""
        for part in self._parts:
            module = part.module()
            if module is not None:
                yield from part.changed(vars(module))

    def switched(self) -> Iterator[tuple[str, bool]]:
        """The modules, by path, that are in another mode now, each with its ``training``."""
        for part in self._parts:
            module = part.module()
            if module is not None and module.training is not part.training:
                yield part.path, module.training

    def replaced(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that have taken the places of others, by path."""
        for part in self._parts:
            module = part.module()
            for name, child in vars(module)["_modules"].items() if module is not None else ():
                before = part.children.get(name)
                if before is not None and child is not None and before() is not child:
                    yield _joined(part.path, name), child

    def set_on(self, modules: Mapping[str, nn.Module]) -> Iterator[Setting]:
        """The settings that were given, with other values, to modules without a code of their own, by path,
        which stand for those of the model.
        """
        for part in self._parts:
            module = modules.get(part.path)
            if module is not None:
                own = vars(module)
                yield from part.changed({name: own.get(name, it) for name, it in part.settings.items()})


def is_same_setting(value: Any, other: Any) -> bool:
    """Whether they are equal; of two that are neither flag, number nor text (tensors): of one class."""
    if isinstance(value, _SETTINGS) and isinstance(other, _SETTINGS):
        return value == other
    return value is other or type(value) is type(other)


def _part(path: str, module: nn.Module, set_by_forward: Collection[str]) -> _Part:
    settings = {
        name: value
        for name, value in vars(module).items()
        if type(value) in _SETTINGS and name != "training" and _joined(path, name) not in set_by_forward
    }
    children = {name: ref(child) for name, child in module.named_children()}
    return _Part(path, ref(module), module.training, settings, children)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
