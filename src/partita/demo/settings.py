"""What a demo run is asked to do: plain data that travels to every process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from partita.demo.model import TransformerConfig
from partita.errors import UsageError

__all__ = ["DemoSettings", "check_writable"]


@dataclass(frozen=True)
class DemoSettings:
    """The options of ``partita demo``, and the sizes of what it trains.

    Attributes:
        steps: training steps.
        stages: how many stages, each on a process of its own.
        schedule: ``1F1B`` or ``GPipe``.
        microbatches: into how many a batch is cut.
        microbatch: sequences in a microbatch.
        seed: of the weights, the data order and dropout.
        learning_rate: of AdamW.
        validate_every: steps between two looks at the validation files.
        model: sizes of the transformer.
    """

    steps: int = 24
    stages: int = 2
    schedule: str = "1F1B"
    microbatches: int = 8
    microbatch: int = 4
    seed: int = 0
    learning_rate: float = 1e-3
    validate_every: int = 8
    model: TransformerConfig = field(default_factory=TransformerConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "stages", "microbatches", "microbatch"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {getattr(self, name)}: give 1 or more")

    @property
    def batch(self) -> int:
        """Sequences in a batch."""
        return self.microbatches * self.microbatch

    def validates_after(self, step: int) -> bool:
        """Return whether the validation loss is taken after ``step``."""
        return (step + 1) % self.validate_every == 0 or step + 1 == self.steps

    def describe(self) -> dict[str, str]:
        """Return names and values for a report."""
        return {key: str(value) for key, value in asdict(self).items() if key != "model"}


def check_writable(folder: Path) -> None:
    """Make the output folder and try to write there, before anything costs time.

    Raises:
        UsageError: the folder can't be made or written to.
    """
    probe = folder / ".partita-probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"--out {folder} can't be written to ({error.strerror}): give a folder that can, "
            "such as --out ./demo"
        ) from error
