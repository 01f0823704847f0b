"""One row of the table: an architecture cut in 2 and in 4 stages, compared with the whole model.

Runs in a process of its own (``python -m tools.models.row NAME``) and prints the row as one line of JSON, so
that whatever it does, a crash included, stays a row.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from tools.models.architecture import Architecture, make_inputs, make_model
from tools.models.cuts import MICROBATCHES, SAMPLES, Cuts, EagerCuts
from tools.models.samples import is_mask
from tools.models.torch_own import cut_by_torch
from tools.models.zoo import PARTS, ZOO
from torch import Tensor, nn

from partita.errors import PartitaError, VerificationFailed

__all__ = ["CELLS", "COMPILED_WORDS", "STAGES", "Row", "called_model", "compiled_word", "make_row"]

STAGES = (2, 4)

CELLS = tuple(f"{stages} {what}" for stages in STAGES for what in ("train", "eval", "step"))
"""What is compared: a local call of the pipe in each mode, and a step of a pipeline of ranks."""

COMPILED_WORDS = ("equal", "as compiled")
"""See `Cuts.compare_compiled_steps`."""

Check = Callable[[], None]


@dataclass
class Row:
    """A row of the table.

    Attributes:
        name: of the architecture.
        family: its group.
        model: its class.
        parameters: how many it has, as configured here.
        cells: by name; the empty string where all was equal, else what went wrong, in one line.
        torch_own: what torch's own ``pipeline`` makes of it: "equal", or what went wrong. First part only.
        compiled: of steps of compiled stages: one of `COMPILED_WORDS`, or what went wrong. First part only.
        batch: whether the batch size stays open: "open", or why not. Second part only.
        frontend: which one cut it.
        masks: how many arguments are masks. Second part only.
        seconds: for all of it.
    """

    name: str
    family: str
    model: str
    parameters: int = 0
    cells: dict[str, str] = field(default_factory=dict)
    torch_own: str = ""
    compiled: str = ""
    batch: str = ""
    frontend: str = ""
    masks: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything was compared and equal."""
        return self.passed_in(STAGES)

    def passed_in(self, stages: Sequence[int]) -> bool:
        """Whether everything was compared and equal, cut in so many stages."""
        return all(self.cells.get(cell) == "" for cell in CELLS if int(cell.split()[0]) in stages)


def make_row(
    architecture: Architecture, tell: Callable[[Row], None] = id, stages: tuple[int, ...] = STAGES
) -> Row:
    """Cut and compare one architecture, as its part of the table does.

    Args:
        tell: given the row each time that something is added to it.
        stages: into how many it is cut, one after the other.
    """
    started = time.monotonic()
    row = Row(architecture.name, architecture.family, architecture.model)
    model, config = called_model(architecture)
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    inputs = make_inputs(architecture, config, SAMPLES)
    for count in stages:
        first = architecture in PARTS[0]
        cuts = EagerCuts(model, make_inputs(architecture, config, SAMPLES), count)
        checks = (
            _checks_on_example(architecture, config, cuts)
            if first
            else _checks_on_others(architecture, config, cuts, row)
        )
        for what, check in checks.items():
            row.cells[f"{count} {what}"] = _outcome(check)
            row.frontend = row.frontend or cuts.frontend
            row.seconds = time.monotonic() - started
            tell(row)
    if architecture in PARTS[0]:
        row.compiled = compiled_word(architecture, model, config)
        tell(row)
        row.torch_own = _outcome(lambda: cut_by_torch(copy.deepcopy(model), inputs)) or "equal"
    row.seconds = time.monotonic() - started
    return row


def called_model(architecture: Architecture) -> tuple[nn.Module, Any]:
    """A model, and its configuration. It has been called once: then some set attributes of their own, as Swin
    does its windows.
    """
    model, config = make_model(architecture)
    with torch.no_grad():
        model.eval()(**make_inputs(architecture, config, SAMPLES))
    return model, config


def compiled_word(architecture: Architecture, model: nn.Module, config: Any) -> str:
    """How steps of compiled stages, four on two ranks, are equal (`COMPILED_WORDS`), or what went wrong."""
    cuts = Cuts(model, make_inputs(architecture, config, SAMPLES), STAGES[-1], for_training=True)
    batch = make_inputs(architecture, config, SAMPLES * MICROBATCHES)
    try:
        return cuts.compare_compiled_steps(batch)
    except Exception as error:
        return _line(error)


def _checks_on_example(architecture: Architecture, config: Any, cuts: EagerCuts) -> dict[str, Check]:
    """The first part: on the inputs that it was cut with; a step against the uncut graph, or the model itself
    where there is no graph.
    """

    def step() -> None:
        cuts.in_mode(True)
        if cuts.frontend == "export":
            cuts.compare_steps(make_inputs(architecture, config, SAMPLES * MICROBATCHES))
        else:
            microbatches = [
                make_inputs(architecture, config, SAMPLES, 6 + number) for number in range(MICROBATCHES)
            ]
            cuts.compare_eager_steps(microbatches, architecture.shared)

    return {
        "train": lambda: cuts.compare_calls(training=True),
        "eval": lambda: cuts.compare_calls(training=False),
        "step": step,
    }


def _checks_on_others(architecture: Architecture, config: Any, cuts: EagerCuts, row: Row) -> dict[str, Check]:
    """The second part: on inputs that it was not cut with; a step against the model itself."""
    example = cuts.inputs
    row.masks = sum(map(is_mask, example))
    kinds = ("own", "ones", "padded") if row.masks else ("own",)
    samples = {
        {"own": "other values", "ones": "masks of ones", "padded": "other padding"}[kind]: make_inputs(
            architecture, config, SAMPLES, seed, kind
        )
        for seed, kind in enumerate(kinds, 2)
    }
    larger = make_inputs(architecture, config, SAMPLES + 1, 5)
    microbatches = [
        make_inputs(architecture, config, SAMPLES, 6 + number, kinds[number % len(kinds)])
        for number in range(MICROBATCHES)
    ]
    # some models set the gradients of their inputs themselves, and refuse inputs that ask for them
    leaves = _leaves if cuts.runs_with(_leaves(example)) else dict
    for name in architecture.shared:
        for microbatch in microbatches:
            microbatch[name] = example[name]

    def calls(training: bool) -> None:
        cuts.in_mode(training)  # what can't be cut need not be tried with each sample
        errors = {
            what: _error(partial(cuts.compare_calls, training=training, inputs=leaves(inputs)))
            for what, inputs in samples.items()
        }
        errors[f"batch of {SAMPLES + 1}"] = _error(lambda: _other_batch(cuts, training, leaves(larger), row))
        wrong = {what: error for what, error in errors.items() if error is not None}
        if wrong:
            message = "\n".join(f"{what}: {_line(error)}" for what, error in wrong.items())
            raise Refused(message) if all(map(_refuses, wrong.values())) else AssertionError(message)

    return {
        "train": lambda: calls(True),
        "eval": lambda: calls(False),
        "step": lambda: cuts.compare_eager_steps(microbatches, architecture.shared),
    }


def _leaves(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the same inputs, where those of real numbers ask for gradients."""
    return {
        name: value.clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point() and not is_mask(name)
        else value
        for name, value in inputs.items()
    }


def _other_batch(cuts: Cuts, training: bool, inputs: dict[str, Any], row: Row) -> None:
    """Equal for another batch size too, or refused where the size is closed, which the row says."""
    try:
        copy.deepcopy(cuts.in_mode(training))(**inputs)
    except PartitaError as error:
        row.batch = f"closed: {error}"
        return
    row.batch = row.batch or "open"
    cuts.compare_calls(training=training, inputs=inputs)


class Refused(Exception):
    """For all samples that went wrong, partita itself raised, before any number came out."""


def _refuses(error: Exception) -> bool:
    return isinstance(error, PartitaError) and not isinstance(error, VerificationFailed)


def _outcome(check: Check) -> str:
    """Return an empty string where the check went through; else its error in one line."""
    error = _error(check)
    return "" if error is None else _line(error)


def _error(check: Check) -> Exception | None:
    """Return whatever the check raises: the table says it."""
    try:
        check()
    except Exception as error:
        return error
    return None


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:4])}"


def main() -> None:
    """Print the row of the architecture that is named on the command line; once for each cell of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, *stages = sys.argv[1:]
    [architecture] = [candidate for candidate in ZOO if candidate.name == name]
    row = make_row(
        architecture,
        lambda row: print(json.dumps(asdict(row)), flush=True),
        tuple(map(int, stages)) or STAGES,
    )
    print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
