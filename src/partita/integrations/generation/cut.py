"""A model of ``transformers`` cut for generation: between its layers, without a cache that crosses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from partita.errors import ArgumentError, CaptureError, PartitaError
from partita.integrations.balanced_split_points import balanced_split_points
from partita.integrations.generation.program import check_model
from partita.pipelining import Pipe, SplitPoint, pipeline
from partita.pipelining.frontends.cuts.cuts import Place

__all__ = ["cut_for_generation"]


def cut_for_generation(
    model: nn.Module,
    stages: int,
    split_points: Literal["auto"] | Sequence[str] = "auto",
    **options: Any,
) -> Pipe:
    """Cut a model that has ``generate`` into stages that can keep the caches of their layers.

    The model's own code is cut, not a graph of it, so one cut serves prompts, single tokens, padding and all
    kinds of caches.

    Args:
        model: in evaluation mode.
        stages: how many.
        split_points: the names of the modules at which all stages but the first begin. ``"auto"`` gives each
            stage about as many bytes of parameters, and leaves the model's layers whole.
        options: others of `pipeline`.

    Raises:
        NotSupported: the model has another way of generating.
        ArgumentError: there are not as many split points as stages less one, or the model is being trained.
        CaptureError: the model can't be cut there.
    """
    check_model(model)
    if model.training:
        raise ArgumentError("the model is in training mode, and dropout would be drawn: call model.eval()")
    names = list(split_points)
    if split_points == "auto":
        names = balanced_split_points(model, stages, getattr(model, "_no_split_modules", None) or ())
    if len(names) != stages - 1:
        raise ArgumentError(f"{len(names)} split points make {len(names) + 1} stages, not {stages}")
    spec: dict[Place, SplitPoint] = dict.fromkeys(names, SplitPoint.BEGINNING)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    options = {"modes": "eval", **options}
    tried: list[str] = []
    for example in _examples(device):
        try:
            with torch.no_grad():
                return pipeline(model, (), example, spec, frontend="modules", **options)
        except CaptureError as error:
            raised = error.__cause__  # what the model raises for this kind of mask
            if device.type != "meta" or raised is None or isinstance(raised, PartitaError):
                raise
            tried.append(f"{type(raised).__name__}: {raised}".partition("\n")[0])
    raise CaptureError(
        f"{type(model).__name__} can't be cut on the meta device, since it reads values of tensors there "
        f"({'; '.join(tried)}): cut a model that has memory, on the CPU, and let each rank keep its own stage"
    )


def _examples(device: torch.device) -> Iterator[dict[str, Any]]:
    """Prompts to cut with. On the meta device with a mask that is ready (4-d), for models that read values of
    others to see what they can skip, then with one that is not (2-d).
    """
    example: dict[str, Any] = {
        "input_ids": torch.ones(2, 4, dtype=torch.int64, device=device),
        "use_cache": False,
    }
    if device.type != "meta":
        yield example
        return
    yield example | {"attention_mask": torch.ones(2, 1, 4, 4, dtype=torch.bool, device=device)}
    yield example | {"attention_mask": torch.ones(2, 4, dtype=torch.int64, device=device)}
