"""The parameters of a model's other stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import ref

from torch.nn import Parameter

__all__ = ["OtherWeights"]


class OtherWeights:
    """Parameters of other stages, none of which it keeps alive. A copy or pickle has none.

    Args:
        parameters: stage, name, and parameter.
    """

    def __init__(self, parameters: Iterable[tuple[int, str, Parameter]] = ()) -> None:
        self._parameters = [(index, name, ref(parameter)) for index, name, parameter in parameters]

    def __iter__(self) -> Iterator[tuple[int, str, Parameter]]:
        for index, name, reference in self._parameters:
            parameter = reference()
            if parameter is not None:
                yield index, name, parameter

    def __reduce__(self) -> tuple[type[OtherWeights], tuple[()]]:
        return OtherWeights, ()
