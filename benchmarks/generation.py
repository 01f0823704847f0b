"""How many tokens a second does a model generate over stages, beside the uncut model with and without cache?

``partita bench generation``. Two processes over gloo on this machine, and a Llama with random weights. Four
batches are generated greedily: by ``model.generate`` one after the other, with and without a cache, on the
first process alone; then over the two stages with 1, 2 and 4 batches in flight. All sides generate the same
tokens, which is checked. The second table has layers that sleep in place of computing, four stages and single
sequences: more ranks than cores then measure how well stages are kept busy, and not the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.harness import MIN_ROUNDS, Ratio, progress_bar, ratio, write_json
from partita.cli.models.hugging_face_config import import_transformers
from partita.runtime import ProcessGroupComm

__all__ = ["Row", "main", "measure"]

_IN_FLIGHT = (1, 2, 4)
_BATCHES = 4
_VOCABULARY = 1024
_LIMIT_S = 400.0
_GRACE_S = 10.0


@dataclass(frozen=True)
class Case:
    """A model and what is generated with it.

    Attributes:
        stages: how many processes.
        layers: of the model.
        hidden: its width.
        nap_s: what each layer sleeps, in seconds; 0: nothing.
        rows: sequences in a batch.
        prompt: tokens of each.
        tokens: new ones of each.
        rounds: of measurement, after a warm-up.
    """

    name: str
    stages: int
    layers: int
    hidden: int
    nap_s: float
    rows: int
    prompt: int
    tokens: int
    rounds: int


@dataclass(frozen=True)
class Row:
    """One way of generating.

    Attributes:
        tokens_per_second: of all sequences together, median of the rounds.
        speed: its tokens a second over those of ours with one batch in flight, round by round.
        cache_bytes: the most memory of caches on one rank; None where it was not measured.
    """

    case: str
    way: str
    tokens_per_second: float
    speed: Ratio
    cache_bytes: int | None


def main(*, quick: bool = False, json_path: Path | None = None, console: Console | None = None) -> list[Row]:
    """Measure both cases, print tables, and write JSON where a path is given.

    Args:
        quick: tiny models, few tokens, one round: whether it runs, not how fast.

    Raises:
        UsageError: transformers is not installed.
    """
    import_transformers()  # before processes are started that would end without it
    console = console or Console()
    if quick:
        cases = [
            Case("computes", 2, 2, 16, 0.0, 1, 4, 3, 1),
            Case("sleeps", 2, 2, 16, 0.002, 1, 4, 3, 1),
        ]
    else:
        cases = [
            Case("computes", 2, 8, 512, 0.0, 1, 16, 12, MIN_ROUNDS),
            Case("sleeps", 4, 4, 16, 0.010, 1, 4, 8, MIN_ROUNDS),
        ]
    rows: list[Row] = []
    with progress_bar(console, "generation", [case.name for case in cases]) as done:
        for case in cases:
            rows += measure(case)
            done()
    table = Table("model", "way", "tokens a second", "beside 1 in flight", "cache on a rank, bytes")
    for row in rows:
        cache = "" if row.cache_bytes is None else f"{row.cache_bytes:,}"
        table.add_row(row.case, row.way, f"{row.tokens_per_second:.1f}", str(row.speed), cache)
    console.print(table)
    write_json(json_path, "generation", rows)
    return rows


def measure(case: Case) -> list[Row]:
    """Measure one case: all ways in turn, round by round."""
    answer = _on_processes(case)
    base = answer.seconds[_ours(1)]
    tokens = _BATCHES * case.rows * case.tokens
    return [
        Row(
            case.name,
            way,
            tokens / sorted(seconds)[len(seconds) // 2],
            ratio(base, seconds),
            answer.cache_bytes.get(way),
        )
        for way, seconds in answer.seconds.items()
    ]


def _ours(in_flight: int) -> str:
    return f"stages, {in_flight} in flight"


# --- the model ---


class _Naps(nn.Module):
    """A module after a sleep."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner = inner
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        output: Tensor = self.inner(x)
        return output


def _model(case: Case) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # an optional extra

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=case.hidden,
        intermediate_size=2 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    if case.nap_s:
        for layer in model.model.layers:
            layer.mlp = _Naps(layer.mlp, case.nap_s)
    return model


def _prompts(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(2, _VOCABULARY, (case.rows, case.prompt), generator=generator) for _ in range(_BATCHES)
    ]


# --- processes ---


@dataclass
class _Answer:
    """Seconds of each way, round by round."""

    seconds: dict[str, list[float]]
    cache_bytes: dict[str, int]


def _on_processes(case: Case) -> _Answer:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_body, args=(rank, case, f"{folder}/store", there), daemon=True)
            for rank in range(case.stages)
        ]
        for process in processes:
            process.start()
        there.close()
        try:
            if not here.poll(_LIMIT_S):
                raise RuntimeError(f"{case.stages} ranks still run after {_LIMIT_S:g} s: try --quick")
            answer: _Answer = here.recv()
        except EOFError:
            raise RuntimeError("a rank ended without an answer: its error stands above") from None
        finally:
            for process in processes:
                process.join(_GRACE_S)
                process.kill()
    return answer


def _body(rank: int, case: Case, path: str, answer: Connection) -> None:
    from partita.integrations.generation import PipelineGenerator, cut_for_generation

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=case.stages,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    model, prompts = _model(case), _prompts(case)
    points = [f"model.layers.{stage * case.layers // case.stages}" for stage in range(1, case.stages)]
    with ProcessGroupComm.from_group() as comm:
        pipe = cut_for_generation(model, case.stages, points, prove=False)
        generator = PipelineGenerator(pipe.build_stage(rank, comm=comm), comm)
        options: dict[str, Any] = {"max_new_tokens": case.tokens}

        def uncut(**more: Any) -> list[Tensor] | None:
            return [model.generate(prompt, **options, **more) for prompt in prompts] if rank == 0 else None

        def over_stages(in_flight: int) -> list[Tensor]:
            return generator.generate_batches(prompts, in_flight=in_flight, **options)

        ways: dict[str, Callable[[], Sequence[Tensor] | None]] = {
            "uncut, with a cache": uncut,
            "uncut, without a cache": lambda: uncut(use_cache=False),
        }
        for in_flight in _IN_FLIGHT:
            ways[_ours(in_flight)] = partial(over_stages, in_flight)
        result = _Answer({way: [] for way in ways}, {})
        expected = uncut()
        for number in range(case.rounds + 1):
            for way, run in ways.items():
                seconds, tokens = _timed(comm, run)
                if number:
                    result.seconds[way].append(seconds)
                if tokens is not None and expected is not None:
                    for own, its in zip(tokens, expected, strict=True):
                        if not torch.equal(own, its):
                            raise RuntimeError(f"{way} generates other tokens: {own} for {its}")
                if way.startswith("stages"):
                    sizes = comm.all_gather_object(generator.statistics.cache_bytes)
                    result.cache_bytes[way] = max(sizes)
    if rank == 0:
        answer.send(result)
    dist.destroy_process_group()


def _timed(comm: ProcessGroupComm, run: Callable[[], Any]) -> tuple[float, Any]:
    """From the first rank's start to the last rank's end; they share a clock."""
    comm.barrier()
    started = time.monotonic()
    tokens = run()
    spans = comm.all_gather_object((started, time.monotonic()))
    return max(end for _, end in spans) - min(start for start, _ in spans), tokens
