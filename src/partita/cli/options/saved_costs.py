"""Costs that were saved: read, and taken for the device that is planned for now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partita.errors import PlanError, UsageError
from partita.planning import CostModel, Device, costs_for_device

__all__ = ["SavedCosts", "refuse_model_options"]


@dataclass(frozen=True)
class SavedCosts:
    """Costs from a file.

    Attributes:
        costs: with the seconds of the device that is planned for.
        dtype: of most of the model's parameters; None where the file does not say it.
        seconds: in words what was assumed of these; empty where nothing was.
    """

    costs: CostModel
    dtype: str | None
    seconds: str

    @classmethod
    def read(cls, path: Path, device: Device | None) -> SavedCosts:
        """Read a cost model that was saved, for a device; None for machines as those that it was made for.

        Raises:
            UsageError: the file can't be read.
            PlanError: it is no cost model.
        """
        costs = _read(path)
        before = costs.costed_for
        if before is None:
            words = "" if device is None else f"as {path} has them, taken for those of {device.name}"
            return cls(costs, None, words)
        if device is None:
            return cls(costs, before.dtype, f"those of {before.device}, which {path} was worked out for")
        speed = before.speed_of(device)
        if (before.device, speed) == (device.name, 1.0):
            return cls(costs, before.dtype, "")
        words = (
            f"worked out for {before.device}; {device.name} is taken to be {speed:.3g} times as fast, as it "
            f"is with products of matrices in {before.dtype} (name the model to work them out for it)"
        )
        return cls(costs_for_device(costs, device), before.dtype, words)


def _read(path: Path) -> CostModel:
    try:
        return CostModel.from_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read ({error}): give a saved cost model, or a model") from error
    except PlanError as error:
        raise PlanError(
            f"{path} holds no costs ({error}): give what --save-costs wrote; a configuration of Hugging Face "
            f"is given as --config-json {path}"
        ) from error


def refuse_model_options(costs: str, options: Mapping[str, object]) -> None:
    """Refuse options that say what a model is, where its costs are there already.

    Raises:
        UsageError: one of them is given.
    """
    for option, value in options.items():
        if value not in (None, []):
            raise UsageError(
                f"{option} is given with {costs}, costs that were saved: leave it out, or name the model"
            )
