"""One row of the table: an architecture cut in 2 and in 4, in both modes, compared with the whole model.

Runs in a process of its own (``python -m tools.hf.row NAME``) and prints the row as one line of JSON, so that
whatever it does, a crash included, stays a row.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tools.hf.torch_own import cut_by_torch
from tools.hf.zoo import ZOO, Architecture, make_inputs, make_model
from torch import Tensor, nn

import partita
from partita.pipelining import Pipe, Schedule1F1B, UncutReference, pipeline
from partita.runtime import Comm, InProcessWorld
from partita.verification.tree import tensors

__all__ = ["CELLS", "MICROBATCHES", "SAMPLES", "STAGES", "Cuts", "Row", "make_row"]

STAGES = (2, 4)
MICROBATCHES = 4
SAMPLES = 2
"""In a microbatch."""

CELLS = tuple(f"{stages} {what}" for stages in STAGES for what in ("train", "eval", "step"))
"""What is compared: a local call of the pipe in each mode, and a step of a pipeline of ranks."""


@dataclass
class Row:
    """What came out.

    Attributes:
        name: of the architecture.
        family: its group.
        model: its class.
        parameters: how many it has, as configured here.
        cells: by name; the empty string where all was equal, else what went wrong, in one line.
        torch_own: what torch's own ``pipeline`` makes of it: "equal", or what went wrong.
        seconds: for all of it.
    """

    name: str
    family: str
    model: str
    parameters: int = 0
    cells: dict[str, str] = field(default_factory=dict)
    torch_own: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything was compared and equal."""
        return all(self.cells.get(cell) == "" for cell in CELLS)


def make_row(architecture: Architecture, tell: Callable[[Row], None] = id) -> Row:
    """Cut and compare one architecture.

    Args:
        tell: given the row each time that something is added to it.
    """
    started = time.monotonic()
    row = Row(architecture.name, architecture.family, architecture.model)
    model, config = make_model(architecture)
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    inputs = make_inputs(architecture, config, SAMPLES)
    batch = make_inputs(architecture, config, SAMPLES * MICROBATCHES)
    with torch.no_grad():
        model.eval()(**inputs)  # in their first call some models set attributes of their own (Swin's windows)
    for stages in STAGES:
        cuts = Cuts(model, inputs, stages)
        checks: dict[str, Callable[[], None]] = {
            "train": lambda cuts=cuts: cuts.compare_calls(training=True),
            "eval": lambda cuts=cuts: cuts.compare_calls(training=False),
            "step": lambda cuts=cuts: cuts.compare_steps(batch),
        }
        for what, check in checks.items():
            row.cells[f"{stages} {what}"] = _outcome(check)
            row.seconds = time.monotonic() - started
            tell(row)
    row.torch_own = _outcome(lambda: cut_by_torch(copy.deepcopy(model), inputs)) or "equal"
    row.seconds = time.monotonic() - started
    return row


def _outcome(check: Callable[[], None]) -> str:
    """Nothing where the check went through; else its error in one line."""
    try:
        check()
    except Exception as error:  # whatever it is, it is what the table is to say
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' / '.join(lines[:4])}"
    return ""


class Cuts:
    """A model cut in so many stages, once; the pipe follows ``train()`` and ``eval()``.

    Where the model can't be cut in one mode, it is tried again in the other.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Any], stages: int) -> None:
        self.model = model
        self.inputs = inputs
        self.stages = stages
        self._pipe: Pipe | None = None

    def in_mode(self, training: bool) -> Pipe:
        """The pipe in that mode; the model goes along."""
        self.model.train(training)
        if self._pipe is None:
            pipe = pipeline(self.model, (), self.inputs, stages=self.stages, microbatches=MICROBATCHES)
            if pipe.num_stages != self.stages:
                raise AssertionError(f"{pipe.num_stages} stages, not {self.stages}")
            self._pipe = pipe
        return self._pipe.train(training)

    def compare_calls(self, *, training: bool) -> None:
        """A call of the pipe is one of the model: outputs, gradients, buffers, random state, bit for bit."""
        partita.verify(self.in_mode(training), self.model, (), self.inputs).check()

    def compare_steps(self, batch: dict[str, Any]) -> None:
        """A 1F1B step of ranks is the uncut graph over the same microbatches: outputs, losses, gradients,
        state.
        """
        pipe = self.in_mode(True)
        whole = copy.deepcopy(pipe.whole)
        expected: list[Tensor] = []
        outputs = UncutReference(whole, MICROBATCHES, loss).step(target=_nothing(), losses=expected, **batch)
        state, gradients = _state(whole), _gradients(whole)

        def body(comm: Comm) -> tuple[Any, list[Tensor], dict[str, Tensor], dict[str, Tensor | None]]:
            stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
            losses: list[Tensor] = []
            found = Schedule1F1B(stage, MICROBATCHES, loss).step(target=_nothing(), losses=losses, **batch)
            return found, losses, _state(stage.module), _gradients(stage.module)

        ranks = InProcessWorld(self.stages).run(body)
        _same(ranks[-1][0], outputs, "output")
        _same(ranks[-1][1], expected, "loss")
        for _, _, held, grads in ranks:
            _same(held, {name: state[name] for name in held}, "state")
            _same(grads, {name: gradients[name] for name in grads}, "gradient")
        missing = set(state) - set().union(*(held for _, _, held, _ in ranks))
        if missing:
            raise AssertionError(f"no stage holds {', '.join(sorted(missing)[:3])}")


def loss(output: Any, _target: Any) -> Tensor:
    """Something that depends on every floating-point tensor that the model returns."""
    found = [value for _, value in tensors(output, "") if value.is_floating_point()]
    return torch.stack([value.float().square().mean() for value in found]).sum()


def _nothing() -> Tensor:
    return torch.zeros(SAMPLES * MICROBATCHES)


def _state(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: value.detach().clone() for name, value in named}


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: value.grad for name, value in module.named_parameters(remove_duplicate=False)}


def _same(found: Any, expected: Any, what: str) -> None:
    """Equal bit for bit, and built alike.

    Raises:
        AssertionError: they are not; names the first tensor that differs.
    """
    mine, theirs = list(tensors(found, what)), list(tensors(expected, what))
    if type(found) is not type(expected) or [path for path, _ in mine] != [path for path, _ in theirs]:
        raise AssertionError(f"{what}: the pipeline's is a {type(found).__name__} built in another way")
    for (path, left), (_, right) in zip(mine, theirs, strict=True):
        if left.dtype != right.dtype or left.shape != right.shape:
            raise AssertionError(
                f"{path}: {left.dtype}{list(left.shape)}, not {right.dtype}{list(right.shape)}"
            )
        if not torch.equal(left.nan_to_num(), right.nan_to_num()):
            share = (left != right).float().mean().item()
            raise AssertionError(
                f"{path}: {share:.1%} of the elements differ by up to {(left - right).abs().max():.1e}"
            )


def main() -> None:
    """Print the row of the architecture that is named on the command line; once for each cell of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    [architecture] = [known for known in ZOO if known.name == sys.argv[1]]
    print(json.dumps(asdict(make_row(architecture, lambda row: print(json.dumps(asdict(row)), flush=True)))))


if __name__ == "__main__":
    main()
