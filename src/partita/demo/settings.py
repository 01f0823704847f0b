"""What a demo run is asked to do: plain data that travels to every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from partita.errors import UsageError
from partita.planning import get_schedule
from partita.planning.generators.registry import ScheduleKind

__all__ = ["DemoSettings", "TransformerConfig", "check_writable"]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a `partita.demo.model.ByteTransformer`. The defaults make about 10 million parameters."""

    vocabulary: int = 256
    width: int = 320
    heads: int = 5
    layers: int = 8
    context: int = 64
    dropout: float = 0.1

    @property
    def most_stages(self) -> int:
        """Into how many stages the model can be cut: before, within and after each block."""
        return 2 * self.layers + 4


@dataclass(frozen=True)
class DemoSettings:
    """The options of ``partita demo``, and the sizes of what it trains.

    Attributes:
        steps: training steps.
        stages: how many stages; None for those of two processes.
        schedule: the name of any schedule that trains.
        microbatches: into how many a batch is cut.
        microbatch: sequences in a microbatch.
        seed: of the weights, the data order and dropout.
        learning_rate: of AdamW.
        validate_every: steps between two looks at the validation files.
        model: sizes of the transformer.
    """

    steps: int = 24
    stages: int | None = None
    schedule: str = "1F1B"
    microbatches: int = 8
    microbatch: int = 4
    seed: int = 0
    learning_rate: float = 1e-3
    validate_every: int = 8
    model: TransformerConfig = field(default_factory=TransformerConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "stages", "microbatches", "microbatch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {value}: give 1 or more")

    @property
    def kind(self) -> ScheduleKind:
        """The schedule (ScheduleError where there is none of that name)."""
        return get_schedule(self.schedule)

    @property
    def number_of_stages(self) -> int:
        """How many stages the model is cut into."""
        return 2 * self.kind.stages_a_rank if self.stages is None else self.stages

    @property
    def processes(self) -> int:
        """How many processes there are: each runs as many stages as the schedule was thought out for."""
        return max(1, self.number_of_stages // self.kind.stages_a_rank)

    def check_schedule(self) -> None:
        """Refuse what the schedule can't do, before anything costs time.

        Raises:
            ScheduleError: no such schedule, or one that can't serve so many stages or microbatches.
            UsageError: one that does not train, more stages than the model can be cut into, or stages that do
                not divide among the processes.
        """
        kind, stages, most = self.kind, self.number_of_stages, self.model.most_stages
        if stages > most:
            raise UsageError(f"--stages is {stages}: the demo's model can be cut into at most {most}")
        if not kind.trains:
            raise UsageError(f"--schedule is {kind.name}, which has no backward pass: give 1F1B, say")
        each = kind.stages_a_rank
        if stages % each:
            raise UsageError(
                f"--stages is {stages}, and {kind.name} has {each} on each process: give "
                f"{stages + each - stages % each}, or --schedule 1F1B, which takes any number"
            )
        kind(stages, self.microbatches, self.processes)

    @property
    def batch(self) -> int:
        """Sequences in a batch."""
        return self.microbatches * self.microbatch

    def validates_after(self, step: int) -> bool:
        """Return whether the validation loss is taken after ``step``."""
        return (step + 1) % self.validate_every == 0 or step + 1 == self.steps

    def describe(self) -> dict[str, str]:
        """Return names and values for a report."""
        return {
            "steps": str(self.steps),
            "stages": f"{self.number_of_stages} on {self.processes} processes",
            "schedule": self.kind.name,
            "microbatches of a batch": str(self.microbatches),
            "samples of a microbatch": str(self.microbatch),
            "tokens of a sample": str(self.model.context),
            "learning rate": f"{self.learning_rate:g}",
            "seed": str(self.seed),
            "validated every": f"{self.validate_every} steps",
        }


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
