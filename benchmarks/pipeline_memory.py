"""How much more memory than it must does a rank of a pipeline take?

Real processes train a cut model. What each must have is what its own stage needs::

    parameters + gradients + optimizer state + (saved by one microbatch) x (microbatches in flight)

What it has is the peak of the process (``VmHWM``) less its baseline: the same process before the model, when
it has imported everything and run a small pipeline. The model is cut on the meta device and each rank gives
memory to its own stage, as one does for large models. Torch itself works with a few copies of one layer's
gradient (transposed, then added), which are in the peak: layers here are small beside their stage.

What glibc keeps of freed memory is not counted: with ``MALLOC_MMAP_THRESHOLD_`` set, large tensors leave the
process when they are freed. Without it, its aligned allocations reuse the holes badly that 1F1B leaves (peaks
of 1.4 to 1.7 times what is needed were seen, on glibc 2.36).

    python -m benchmarks.pipeline_memory
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import write_json
from partita.pipelining import SplitPoint, get_schedule_class, pipeline
from partita.pipelining.stages import materialise
from partita.pipelining.stages.stage import Stage

__all__ = ["Measured", "Shape", "main", "measure"]

MIB = 2**20
RANKS = 2
MICROBATCHES = 8


@dataclass(frozen=True)
class Shape:
    """A model of equal layers.

    Attributes:
        name: what dominates.
        layers: in the whole model.
        width: of each layer.
        rows: samples in a microbatch.
    """

    name: str
    layers: int
    width: int
    rows: int


SHAPES = (Shape("parameters", 48, 1024, 16), Shape("activations", 48, 256, 4096))
QUICK = (Shape("quick", 4, 64, 16),)
KINDS = ("GPipe", "1F1B")


@dataclass(frozen=True)
class Measured:
    """One rank's memory, in bytes.

    Attributes:
        shape: what dominates.
        schedule: which one ran.
        needed: what the stage must have.
        activations: of ``needed``, what microbatches in flight keep.
        peak: what the process had beyond its baseline.
        ratio: peak over what must be there.
    """

    shape: str
    schedule: str
    rank: int
    needed: int
    activations: int
    peak: int
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.shape:<12}{self.schedule:<6}rank {self.rank}  needs {self.needed / MIB:6.1f} MiB "
            f"({self.activations / MIB:.1f} of activations)  peak {self.peak / MIB:6.1f} MiB  "
            f"ratio {self.ratio:.3f}"
        )


def _model(shape: Shape) -> nn.Module:
    layers = [
        layer for _ in range(shape.layers) for layer in (nn.Linear(shape.width, shape.width), nn.GELU())
    ]
    return nn.Sequential(*layers)


def _peak() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system's /proc/self/status has no VmHWM")


def _train(shape: Shape, kind: str, steps: int) -> tuple[Stage, int, int]:
    """Train this rank's stage; also return bytes of optimizer and batch, and microbatches in flight."""
    rank = dist.get_rank()
    with torch.device("meta"):
        model = _model(shape)
    example = torch.empty(shape.rows, shape.width, device="meta")
    cut = {str(2 * (shape.layers // RANKS) - 1): SplitPoint.END}
    pipe = pipeline(model, (example,), split_spec=cut)
    stage = pipe.build_stage(rank)
    del pipe, model
    materialise(stage)
    for parameter in stage.module.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(stage.module.parameters(), fused=True)  # without copies of its own
    schedule = get_schedule_class(kind)(stage, MICROBATCHES, functional.mse_loss)
    batch = torch.randn(shape.rows * MICROBATCHES, shape.width) if rank in {0, RANKS - 1} else None
    for _ in range(steps):
        args = (batch,) if rank == 0 else ()
        schedule.step(*args, target=batch if rank == RANKS - 1 else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    in_flight = schedule.schedule().in_flight()[rank]
    schedule.close()

    state = [value for state in optimizer.state.values() for value in state.values()]
    state += [] if batch is None else [batch]
    return stage, sum(_bytes(value) for value in state if isinstance(value, Tensor)), in_flight


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _saved(stage: Stage, shape: Shape) -> int:
    """Return the bytes that a microbatch keeps for its backward pass: what autograd saves, and its input."""
    own = {value.untyped_storage().data_ptr() for value in stage.module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(shape.rows, shape.width, requires_grad=stage.index > 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = stage.module(x)
        if stage.is_last:
            result = functional.mse_loss(result, torch.zeros_like(result))
    for tensor in (x, result):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _worker(shape: Shape, kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    _train(QUICK[0], kind, 2)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
    baseline = _peak()
    stage, state_bytes, in_flight = _train(shape, kind, 3)
    peak = _peak() - baseline
    parameters = sum(_bytes(value) for value in stage.module.parameters())
    activations = in_flight * _saved(stage, shape)
    total = 2 * parameters + state_bytes + activations
    measured = Measured(shape.name, kind, rank, total, activations, peak, peak / total)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(measured)), encoding="utf-8")
    dist.destroy_process_group()


def measure(shape: Shape, kind: str) -> list[Measured]:
    """Train ``shape`` on two ranks, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        worker = ["benchmarks.pipeline_memory", json.dumps(asdict(shape)), kind, folder]
        command = [sys.executable, "-m", *launcher, "-m", *worker]
        root = Path(__file__).parent.parent
        variables = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run(command, check=True, cwd=root, env=variables, timeout=300)
        return [
            Measured(**json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")))
            for rank in range(RANKS)
        ]


def main(*, quick: bool = False, json_path: Path | None = None) -> list[Measured]:
    """Measure all shapes under all schedules, print a line each, and return the figures.

    Args:
        quick: a tiny model: whether it runs, not what it takes.
        json_path: write them there too.
    """
    rows: list[Measured] = []
    for shape in QUICK if quick else SHAPES:
        for kind in KINDS[:1] if quick else KINDS:
            for row in measure(shape, kind):
                print(row)
                rows.append(row)
    write_json(json_path, "pipeline_memory", rows)
    return rows


def _command_line(words: Sequence[str]) -> None:
    if not words:
        main()
        return
    shape, kind, folder = words
    _worker(Shape(**json.loads(shape)), kind, Path(folder))


if __name__ == "__main__":
    _command_line(sys.argv[1:])
