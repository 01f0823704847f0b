"""Finding out, while a model is traced in training, whether it computes the same in evaluation.

Most language models do. Then one trace serves both modes, which saves half of the cost of a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.objects import open_objects
from partita._torch.containers.pytree import flatten, unflatten
from partita._torch.export.same_calls import CallLog
from partita._torch.tensors.versions import times_written
from partita.capture.merging.modes import flags_kept
from partita.capture.tracing.host_draws import HostGenerators
from partita.capture.tracing.unchanged import Attributes

__all__ = ["OtherMode"]


class OtherMode:
    """Watches a trace by `export_module`: runs the model once more, in its other mode, without tracing.

    Args:
        model: the user's.
        other: the mode that it is not traced in.

    Attributes:
        same: whether the model is sure to make the same calls in that mode.
    """

    def __init__(self, model: nn.Module, other: bool) -> None:
        self.same = False
        self._model = model
        self._flags = _flags_in(model, other)
        self._log: CallLog | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the trace: note attributes and the state that calls refer to."""
        if self._flags is None:
            return
        self._flags[model] = self._flags[self._model]
        self._before = Attributes.of([self._model, model, args, kwargs])
        state = [*model.parameters(), *model.buffers()]
        self._log = CallLog([args, kwargs, state])
        self._log.begin()

    def end(self, again: Callable[[], Any], result: Any) -> Any:
        """After it: run ``again`` in the other mode over fake tensors, and undo what that run changes."""
        if self._flags is None or self._log is None:
            return None
        self._log.end(result)
        leaves, structure = flatten(open_objects(result))
        first, generators = self._before.put_back(), HostGenerators(self._model)
        try:
            with flags_kept(self._flags):
                for module, flag in self._flags.items():
                    module.training = flag
                repeats = self._log.repeats(again) and not generators.moved
            second = self._before.put_back()
            self.same = repeats and first.same_as(second)
        finally:
            generators.reset()
            self._before.put_back()
            first.put_back()
        return unflatten(leaves, structure)  # which the second run may have written to

    def stop(self) -> None:
        """The trace has raised: record no more calls."""
        if self._log is not None:
            self._log.stop()


def _flags_in(model: nn.Module, mode: bool) -> dict[nn.Module, bool] | None:
    """The training flag of each module in a mode; None where a module's ``train`` may do more than set flags.

    An overridden ``train`` is called on stand-ins for the modules, without data: the model does not change.
    """
    modules = list(model.modules())
    if any("train" in vars(module) for module in modules):
        return None
    if all(type(module).train is nn.Module.train for module in modules):
        return dict.fromkeys(modules, mode)
    twins = {module: object.__new__(type(module)) for module in modules}
    tensors = []
    for module, twin in twins.items():
        vars(twin).update(vars(module))
        for holder in ("_parameters", "_buffers"):
            empty = {name: _without_data(tensor) for name, tensor in vars(module)[holder].items()}
            vars(twin)[holder] = empty
            tensors += [tensor for tensor in empty.values() if tensor is not None]
        children = vars(module)["_modules"].items()
        vars(twin)["_modules"] = {name: None if child is None else twins[child] for name, child in children}
    before, versions = Attributes.of(list(twins.values())), list(map(times_written, tensors))
    try:
        with flags_kept(twins.values()):
            twins[model].train(mode)
            flags = {module: twin.training for module, twin in twins.items()}
    except Exception:
        return None
    finally:
        changed = before.put_back()
    written = versions != list(map(times_written, tensors))
    return None if written or changed.snapshots else flags


def _without_data(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device="meta")
