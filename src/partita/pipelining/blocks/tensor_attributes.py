"""Tensors that a model's modules keep in attributes of their own from one call to the next."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from partita._torch.tensors.versions import times_written

__all__ = ["TensorAttributes"]

Looks = list[tuple[Any, int, int]]


class TensorAttributes:
    """Watches attributes that are tensors, or None as yet, and writes to buffers.

    A buffer that is replaced by another one is not noticed: rotary embeddings do so for the length of each
    call.

    >>> model = nn.Linear(2, 2)
    >>> model.kept = None
    >>> attributes = TensorAttributes(model)
    >>> before = attributes.look()
    >>> model.kept = model.weight * 2
    >>> attributes.changed_since(before)
    'kept'
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, str, bool]] = []
        for path, module in model.named_modules():
            tables = ((vars(module), False), (vars(module)["_buffers"], True))
            for table, is_buffer in tables:
                for name, value in table.items():
                    if isinstance(value, Tensor) or (value is None and not is_buffer):
                        full_name = f"{path}.{name}" if path else name
                        self._places.append((table, name, full_name, is_buffer))

    def look(self) -> Looks:
        """Return what is there now."""
        looks: Looks = []
        for table, name, _, _ in self._places:
            value = table.get(name)
            tensor = value if isinstance(value, Tensor) else None
            looks.append((tensor, id(value), 0 if tensor is None else times_written(tensor)))
        return looks

    def changed_since(self, before: Looks) -> str | None:
        """Return the name of one that was replaced or written to, or None."""
        for (_, _, name, is_buffer), old, new in zip(self._places, before, self.look(), strict=True):
            replaced = old[1] != new[1] and (old[0] is not None or new[0] is not None)
            if (replaced and not is_buffer) or (old[1] == new[1] and old[2] != new[2]):
                return name
        return None
