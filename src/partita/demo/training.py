"""What the demo's processes run: measurements, a stage of the pipeline each, or the uncut model."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional

from partita.demo.data import ByteCorpus, read_corpus
from partita.demo.events import EventWriter
from partita.demo.model import ByteTransformer
from partita.demo.peak_memory import PeakMemory
from partita.demo.settings import DemoSettings
from partita.pipelining import UncutReference, keyed_graph, measure_units, pipeline
from partita.pipelining.measuring.link_times import measure_cluster
from partita.pipelining.schedules import PipelineSchedule
from partita.planning import Plan
from partita.runtime import ProcessGroupComm, Tracer, gather

__all__ = ["build_model", "example", "measure_rank", "next_byte_loss", "train_rank", "train_uncut"]


def build_model(settings: DemoSettings) -> ByteTransformer:
    """Make the model, on one thread; the same seed gives the same weights in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    return ByteTransformer(settings.model)


def example(settings: DemoSettings) -> Tensor:
    """Return a microbatch of the right shape."""
    return torch.zeros((settings.microbatch, settings.model.context), dtype=torch.int64)


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@record
def measure_rank(settings: DemoSettings) -> tuple[str, str]:
    """Measure the model's units and the links while all ranks do so, as they will share the machine in a
    step; return the costs and the cluster as JSON.
    """
    dist.init_process_group("gloo")
    model, microbatch = build_model(settings), example(settings)
    with ProcessGroupComm.from_group() as comm:
        comm.barrier()
        costs = measure_units(model, (microbatch,), loss_fn=next_byte_loss, target=microbatch)
        cluster = measure_cluster(comm)
    dist.destroy_process_group()
    return costs.to_json(), cluster.to_json()


@record
def train_uncut(settings: DemoSettings, folder: str) -> None:
    """Train the uncut model over the same microbatches, random numbers by the pipeline's rule."""
    events = EventWriter(Path(folder) / "uncut.jsonl")
    model = build_model(settings)
    corpus = read_corpus()
    whole = keyed_graph(model, (example(settings),))
    runner = UncutReference(whole, settings.microbatches, next_byte_loss, seed=settings.seed)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=settings.learning_rate)
    for step in range(settings.steps):
        losses: list[Tensor] = []
        inputs, target = _batch(corpus, settings, step)
        started = time.perf_counter()
        optimizer.zero_grad()
        runner.step(inputs, target=target, losses=losses)
        optimizer.step()
        seconds = time.perf_counter() - started
        events.write("step", step=step, loss=_mean(losses), seconds=seconds)
        if settings.validates_after(step):
            events.write("validation", step=step, loss=_validate_uncut(whole, corpus, settings, step))
    _save(whole, Path(folder) / "uncut.safetensors")
    events.close()


@record
def train_rank(settings: DemoSettings, plan_text: str, folder: str) -> None:
    """Train this rank's stages of the pipeline."""
    dist.init_process_group("gloo")
    memory = PeakMemory()
    rank = dist.get_rank()
    tracer = Tracer(rank)
    events = EventWriter(Path(folder) / f"rank{rank}.jsonl")
    corpus = read_corpus()
    with ProcessGroupComm.from_group() as comm:
        # This rank's stages of the model; the rest of it is dropped.
        pipe = pipeline(build_model(settings), (example(settings),), plan=Plan.from_json(plan_text))
        schedule = pipe.schedule(next_byte_loss, comm=comm, seed=settings.seed)
        stages = schedule.stages
        has_loss = any(stage.is_last for stage in stages.values())
        del pipe
        gc.collect()  # from here on only this rank's parameters are in memory
        memory.start_anew()
        optimizer = torch.optim.AdamW(_parameters(schedule), lr=settings.learning_rate)
        for step in range(settings.steps):
            last = step + 1 == settings.steps
            if last:
                schedule.tracer = tracer
            losses: list[Tensor] = []
            inputs, target = _batch(corpus, settings, step)
            # A step, timed from when all ranks are ready to when all are done.
            comm.barrier()
            started = time.perf_counter()
            optimizer.zero_grad()
            schedule.step(inputs, target=target, losses=losses)
            optimizer.step()
            comm.barrier()
            seconds = time.perf_counter() - started
            # What the report shows of it.
            if has_loss:
                events.write("step", step=step, loss=_mean(losses), seconds=seconds)
            if last:
                events.write("memory", rank=rank, bytes=memory.bytes())
                _write_trace(events, comm, tracer)
            if settings.validates_after(step):
                schedule.tracer = Tracer(rank)
                loss = _validate_rank(schedule, corpus, settings, step)
                if has_loss:
                    events.write("validation", step=step, loss=loss)
        for index, stage in stages.items():
            _save(stage.module, Path(folder) / f"stage{index}.safetensors")
        events.close()
    dist.destroy_process_group()


def _batch(
    corpus: ByteCorpus, settings: DemoSettings, step: int, *, validation: bool = False
) -> tuple[Tensor, Tensor]:
    return corpus.batch(
        step, settings.batch, settings.model.context, seed=settings.seed, validation=validation
    )


def _mean(losses: list[Tensor]) -> float:
    """The mean over equal microbatches, summed in order."""
    return sum(loss.item() for loss in losses) / len(losses) if losses else float("nan")


def _validate_uncut(whole: nn.Module, corpus: ByteCorpus, settings: DemoSettings, step: int) -> float:
    inputs, target = _batch(corpus, settings, step, validation=True)
    whole.eval()
    with torch.no_grad():
        parts = zip(inputs.chunk(settings.microbatches), target.chunk(settings.microbatches), strict=True)
        losses = [next_byte_loss(whole(part), aim) for part, aim in parts]
    whole.train()
    return _mean(losses)


def _validate_rank(
    schedule: PipelineSchedule, corpus: ByteCorpus, settings: DemoSettings, step: int
) -> float:
    inputs, target = _batch(corpus, settings, step, validation=True)
    losses: list[Tensor] = []
    for stage in schedule.stages.values():
        stage.module.eval()
    schedule.eval(inputs, target=target, losses=losses)
    for stage in schedule.stages.values():
        stage.module.train()
    return _mean(losses)


def _parameters(schedule: PipelineSchedule) -> list[nn.Parameter]:
    """Those of all stages of this rank, each once."""
    stages = schedule.stages.values()
    return list({id(value): value for stage in stages for value in stage.module.parameters()}.values())


def _write_trace(events: EventWriter, comm: ProcessGroupComm, tracer: Tracer) -> None:
    for event in gather(comm, tracer):
        if comm.rank == 0:
            events.write("span", **(asdict(event) | {"args": dict(event.args)}))


def _save(module: nn.Module, path: Path) -> None:
    """All parameters under all of their names; each name gets its own copy."""
    save_file(
        {name: value.detach().clone() for name, value in module.state_dict(keep_vars=True).items()}, path
    )
