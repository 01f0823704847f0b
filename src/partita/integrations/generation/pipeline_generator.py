"""``generate`` of a model of ``transformers`` whose stages are on several ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from partita.errors import ArgumentError, PartitaError
from partita.integrations.broadcast_value import broadcast_value
from partita.integrations.generation.draws import (
    Draws,
    GlobalDraws,
    SeededDraws,
    SharedDraws,
    get_state,
    set_state,
)
from partita.integrations.generation.parts import cut_batch, join, number_of_rows, with_own_processors
from partita.integrations.generation.program import PreparedGeneration, check_model, generate_program, prepare
from partita.integrations.generation.settings import settings_of
from partita.pipelining.blocks.stage_module import StageModule
from partita.pipelining.decoding import run_programs
from partita.pipelining.decoding.run_programs import ProgramStatistics, check_stage
from partita.pipelining.stages import Stage
from partita.runtime import Comm, ProcessGroupComm
from partita.runtime.one_at_a_time import one_at_a_time
from partita.runtime.publish_errors import publish_errors
from partita.runtime.same_settings import check_same

__all__ = ["GenerationStatistics", "PipelineGenerator"]


@dataclass(frozen=True)
class GenerationStatistics:
    """What the last generation took on this rank.

    Attributes:
        new_tokens: how many tokens were generated, those of finished sequences (padding) included.
        seconds: from the first call of the model to the last token.
        calls: how many calls of the model this rank's stage has run.
        cache_bytes: the most memory that caches had on this rank at once: those of its own layers, of the
            batches in flight.
    """

    new_tokens: int
    seconds: float
    calls: int
    cache_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, of all sequences together."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


class PipelineGenerator:
    """Generates text with a model whose stages are on several ranks, one each.

    Every rank calls the same methods with the same arguments. ``model.generate`` of transformers works out
    everything but the tokens from them: masks and positions of left-padded batches, the kind of cache,
    logits processors, stopping criteria. Each call of the model then goes through the stages, of which each
    keeps the cache of its own layers; tokens are chosen on the last rank. They are those of
    ``model.generate``, of the uncut model, for the same batches.

    Beam search, assisted decoding, encoder-decoder models and caches that are filled already are refused.

    Args:
        stage: this rank's, from the pipe of `cut_for_generation`, or ``pipeline(..., frontend="modules")``.
        comm: between the stages; None: the stage's own, or one over its process group.

    Raises:
        NotSupported: the model has another way of generating.
        ArgumentError: the stage was captured, is in training mode, or is not the one of this rank.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from partita.integrations.generation import PipelineGenerator, cut_for_generation
    >>> from partita.runtime import InProcessWorld
    >>> config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, eos_token_id=None)
    >>> model = GPT2LMHeadModel(config).eval()
    >>> pipe = cut_for_generation(model, 2)
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> def run(comm):
    ...     generator = PipelineGenerator(pipe.build_stage(comm.rank, comm=comm), comm)
    ...     return generator.generate(prompt, max_new_tokens=4)
    >>> tokens = InProcessWorld(2).run(run)
    >>> bool((tokens[0] == model.generate(prompt, max_new_tokens=4)).all())
    True
    """

    def __init__(self, stage: Stage, comm: Comm | None = None) -> None:
        comm = comm or stage.comm
        if comm is None:
            comm = stage.comm = ProcessGroupComm.from_group(stage.group)
        check_stage(stage, comm)
        self.stage = stage
        self.comm = comm
        self.statistics = GenerationStatistics(0, 0.0, 0, 0)
        self._model: Any = cast("StageModule", stage.module).code_that_runs
        check_model(self._model)

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        in_flight: int = 1,
        streamer: Any = None,
        **options: Any,
    ) -> Any:
        """Generate tokens for one batch, as ``model.generate`` does. Collective.

        With ``in_flight`` of 2 or more the batch is cut into as many parts, which take turns, so that all
        stages have something to do. Each part is generated as a batch of its own (one matrix product of
        fewer rows may round differently), and its finished sequences do not wait for other parts. Sampling
        draws for the whole batch, so that a row gets the tokens that it gets in the whole batch.

        Args:
            inputs: int64[batch, length], the prompts, padded on the left.
            in_flight: into how many parts the batch is cut; as many as there are stages keep all busy.
            streamer: of transformers; called on each rank that gives one, so give it on one.
            options: of ``model.generate``: ``attention_mask``, ``max_new_tokens``, ``do_sample``,
                ``generation_config``, ``logits_processor`` and so on.

        Returns:
            int64[batch, length], prompts included, or a ``GenerateDecoderOnlyOutput`` without caches, on
            every rank. torch's random generator has moved on on every rank as on the last.

        Raises:
            ArgumentError: what can't be followed over stages.
            SignatureMismatch: ranks have different prompts or masks.
            PeerFailed: another rank failed.
        """
        options = dict(options)
        if inputs is None:
            inputs = options.pop("input_ids", None)
        batch = number_of_rows(inputs, options)
        if in_flight < 1:
            raise ArgumentError(f"in_flight is {in_flight}: give at least 1")
        if streamer is not None and (in_flight > 1 or batch > 1):
            raise ArgumentError(
                f"a streamer takes one sequence, and there are {batch} in {in_flight} parts: give one prompt "
                "and leave in_flight out, or read the tokens of all when they are there"
            )
        with one_at_a_time(self.comm, "generate()"):
            check_same(self.comm, settings_of([(inputs, options)], {}, in_flight))
            parts = cut_batch(inputs, options, min(in_flight, batch), batch)
            prepared = self._prepared([(part.inputs, part.options) for part in parts])
            repeated = len(prepared[0].input_ids) // (parts[0].rows.stop - parts[0].rows.start)
            if len(parts) > 1 and prepared[0].config.return_dict_in_generate:
                raise ArgumentError(
                    "return_dict_in_generate returns the scores of one batch: leave it out, or in_flight"
                )
            draws: list[Draws] = [GlobalDraws()]
            if len(parts) > 1:
                states: list[Tensor] = []
                draws = [
                    SharedDraws(
                        slice(part.rows.start * repeated, part.rows.stop * repeated), batch * repeated, states
                    )
                    for part in parts
                ]
            results = self._run(prepared, draws, len(parts), streamer)
            if prepared[0].config.do_sample:
                self._share_generator()
            return results[0] if len(results) == 1 else join(results, prepared[0])

    def generate_batches(
        self,
        batches: Sequence[Tensor | Mapping[str, Any]],
        *,
        in_flight: int | None = None,
        seeds: Sequence[int] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Generate tokens for several batches, of any lengths, some of them at a time. Collective.

        The next batch begins where one has ended, so all stages are busy until the last ones.

        Args:
            batches: prompts, int64[batch, length], or the arguments of ``model.generate`` for one batch.
            in_flight: how many batches take turns; None: as many as there are stages.
            seeds: for sampling, one a batch: its tokens are those after ``torch.manual_seed(seed)``.
            options: of ``model.generate``, for all batches.

        Returns:
            For each batch what `generate` returns, on every rank. torch's random generator is left as it was.

        Raises:
            ArgumentError: what can't be followed over stages; sampling without seeds.
            SignatureMismatch: ranks have different prompts or masks.
            PeerFailed: another rank failed.
        """
        if seeds is not None and len(seeds) != len(batches):
            raise ArgumentError(f"{len(seeds)} seeds for {len(batches)} batches: give one a batch")
        in_flight = in_flight or self.comm.size
        arguments = [_arguments(batch) for batch in batches]
        with one_at_a_time(self.comm, "generate_batches()"):
            check_same(self.comm, settings_of(arguments, options, in_flight))
            prepared = self._prepared(
                [(inputs, with_own_processors({**options, **kwargs})) for inputs, kwargs in arguments]
            )
            if seeds is None and any(one.config.do_sample for one in prepared):
                raise ArgumentError(
                    "batches that take turns can't share one random generator and stay what they are alone: "
                    "give seeds, one a batch"
                )
            draws: list[Draws] = [
                GlobalDraws() if seeds is None else SeededDraws(seed) for seed in seeds or [0] * len(batches)
            ]
            return self._run(prepared, draws, in_flight, None)

    def _prepared(self, arguments: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[PreparedGeneration]:
        """What ``generate`` works out. What it refuses, all ranks refuse; any other failure is published."""
        with publish_errors(self.comm, "preparing to generate", alike=(PartitaError, ValueError)):
            return [prepare(self._model, inputs, kwargs) for inputs, kwargs in arguments]

    def _run(
        self, prepared: Sequence[PreparedGeneration], draws: Sequence[Draws], in_flight: int, streamer: Any
    ) -> list[Any]:
        """Run the programs, and return the results on every rank."""
        programs = [
            generate_program(self._model, one, its_draws)
            for one, its_draws in zip(prepared, draws, strict=True)
        ]
        statistics = ProgramStatistics()
        started = time.perf_counter()
        results = run_programs(
            self.stage,
            programs,
            in_flight=in_flight,
            comm=self.comm,
            on_report=None if streamer is None else lambda _, tokens: streamer.put(tokens),
            statistics=statistics,
        )
        outputs = broadcast_value(self.comm, results, self.comm.size - 1, self.stage.device)
        seconds = time.perf_counter() - started
        if streamer is not None:
            streamer.put(_sequences(outputs[0])[:, -1].cpu())
            streamer.end()
        new_tokens = sum(
            sequences.shape[0] * (sequences.shape[1] - one.input_ids.shape[1])
            for one, output in zip(prepared, outputs, strict=True)
            for sequences in [_sequences(output)]
        )
        self.statistics = GenerationStatistics(new_tokens, seconds, statistics.calls, statistics.state_bytes)
        return list(outputs)

    def _share_generator(self) -> None:
        """Let every rank's random generator be where the last rank's is."""
        device = self.stage.device
        state = get_state(device).to(device) if self.comm.rank == self.comm.size - 1 else None
        set_state(broadcast_value(self.comm, state, self.comm.size - 1, device).cpu(), device)


def _arguments(batch: Tensor | Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        return kwargs.pop("inputs", None), kwargs
    return batch, {}


def _sequences(output: Any) -> Tensor:
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences
