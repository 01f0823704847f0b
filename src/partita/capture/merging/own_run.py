"""The model's own run of its example, for what a trace can't know: which answers it gets where it branches on
data, and whether it runs at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, tree_map
from partita._torch.export.conditions import Answers, answers_given
from partita._torch.export.eager_answers import eager_answers
from partita._torch.tensors.detached_copy import detached_copy
from partita._torch.tensors.free_memory import too_little
from partita._torch.tensors.storage import has_memory
from partita.capture.merging.modes import in_mode
from partita.capture.tracing.blame import summary
from partita.capture.tracing.host_draws import HostGenerators
from partita.capture.tracing.unchanged import rehearsal
from partita.errors import CaptureError

__all__ = ["OwnRun"]


@dataclass(frozen=True)
class OwnRun:
    """A model and its example arguments. Running it changes neither."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def answers(self, training: bool) -> dict[str, list[bool]] | None:
        """Return what the model hears, by the line that asks; None where it can't run, or has no data."""
        answers = Answers()
        try:
            with answers_given(answers):
                raised = self._raised(training)
        except Exception:  # the trace then tells what is wrong
            return None
        return None if raised is not None else answers.by_place

    def check(self, training: bool) -> None:
        """After a trace that failed: tell where it is the model that fails.

        Raises:
            CaptureError: with the model's error and line.
        """
        flat = [leaf for leaf in flatten((self.args, self.kwargs))[0] if isinstance(leaf, Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), *flat]
        # not nbytes, which sparse tensors lack
        copies_and_results = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        devices = (tensor.device for tensor in tensors)
        if not all(map(has_memory, tensors)) or too_little(copies_and_results, devices):
            return
        try:
            with eager_answers():
                raised = self._raised(training, parameters=True)
        except Exception:  # it can't be tried without changing it
            return
        if raised is not None:
            mode = "training" if training else "evaluation"
            raise CaptureError(
                f"{type(self.model).__name__} itself raises {type(raised).__name__} with its example in "
                f"{mode}: {summary(raised).rstrip('.')}. Give it example arguments that it runs with"
            ) from raised

    def _raised(self, training: bool, *, parameters: bool = False) -> Exception | None:
        """What a run raises.

        Args:
            parameters: run it also where it writes into them; see `rehearsal`.
        """
        generators = HostGenerators(self.model)
        args, kwargs = tree_map(detached_copy, (self.args, self.kwargs))
        try:
            with rehearsal(self.model, parameters=parameters), in_mode(self.model, training):
                try:
                    self.model(*args, **kwargs)
                except Exception as error:
                    return error
        finally:
            generators.reset()
        return None
