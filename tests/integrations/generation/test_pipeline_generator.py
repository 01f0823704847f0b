"""Tokens over stages are those of ``model.generate``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.integrations.generation.generation_models import DECODERS, EOS, PAD, model, on_stages, prompts
from tests.runtime.worlds import endings, patience
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from partita.errors import ArgumentError, ArgumentTypeError, ExecutionError, NotSupported, SignatureMismatch
from partita.integrations.generation import PipelineGenerator, cut_for_generation
from partita.pipelining import pipeline
from partita.runtime import Comm, InProcessWorld

SAMPLING = {"do_sample": True, "top_k": 20, "top_p": 0.95, "temperature": 1.3, "repetition_penalty": 1.2}


def _both(name: str, stages: int, in_flight: int = 1, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The tokens of the uncut model, and those on each rank."""
    options = {"max_new_tokens": 8, **options}
    whole = model(name)  # made with random numbers, the first time
    torch.manual_seed(5)
    expected = whole.generate(**prompts(), **options)
    torch.manual_seed(5)
    return expected, on_stages(
        name, stages, lambda generator: generator.generate(**prompts(), in_flight=in_flight, **options)
    )


def _check(expected: Tensor, results: list[Tensor]) -> None:
    for result in results:
        assert result.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "stages"),
    [*((name, 2) for name in DECODERS), *((name, 4) for name in ("gpt2", "llama", "qwen2", "mistral"))],
)
def test_greedy_tokens_of_left_padded_prompts_are_those_of_the_uncut_model(name: str, stages: int) -> None:
    _check(*_both(name, stages))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "mistral"])
def test_sampled_tokens_of_a_batch_in_parts_are_those_of_the_whole_batch(name: str) -> None:
    _check(*_both(name, 4, 3, **SAMPLING))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_static_caches_of_full_and_sliding_layers(name: str) -> None:
    _check(*_both(name, 4, 2, cache_implementation="static"))


def test_without_a_cache() -> None:
    _check(*_both("llama", 2, use_cache=False))


def test_one_stage_alone() -> None:
    _check(*_both("llama", 1))


def test_finished_sequences_are_padded_and_parts_end_on_their_own() -> None:
    expected, results = _both("llama", 2, 4, max_new_tokens=40, **SAMPLING)
    _check(expected, results)
    assert (expected[:, -1] == PAD).any()  # some ended early
    assert (expected == EOS).any()


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 6, **SAMPLING},
        {"max_length": 12},
        {"num_return_sequences": 3, **SAMPLING},
        {"no_repeat_ngram_size": 1},
        {"max_new_tokens": 1},
        {"suppress_tokens": [5, 6, 7]},
    ],
    ids=lambda options: "-".join(options)[:30],
)
def test_options_of_generate(options: dict[str, Any]) -> None:
    options = {"max_new_tokens": None, **options} if "max_length" in options else options
    _check(*_both("llama", 2, 2, **options))


class _Counts(LogitsProcessor):
    """Prefers the token of the number of its call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, 5 + self.calls] += 100.0
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_allowed_tokens_fn": lambda row, _: [4 + 2 * row, 5 + 2 * row, 20]},
        # as many ids that end a sequence as there are rows: they were cut by rows
        {"eos_token_id": torch.tensor([30, 31, 32, 8])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_parts_of_a_batch_get_what_the_whole_batch_gets(options: dict[str, Any]) -> None:
    """The function was told the number of the row in the part."""
    counting = LogitsProcessorList([_Counts()])
    whole = model("llama").generate(
        **prompts(), max_new_tokens=8, **options, logits_processor=copy.deepcopy(counting)
    )
    _check(
        whole,
        on_stages(
            "llama",
            2,
            lambda generator: generator.generate(
                **prompts(), max_new_tokens=8, in_flight=2, **options, logits_processor=counting
            ),
        ),
    )
    assert counting[0].calls == 0  # parts have copies: their calls were counted together


def test_batches_that_take_turns_have_a_processor_each() -> None:
    batches = [prompts(2, 5), prompts(3, 9)]
    expected = [
        model("llama")
        .generate(**batch, max_new_tokens=5, logits_processor=LogitsProcessorList([_Counts()]))
        .tolist()
        for batch in batches
    ]
    results = on_stages(
        "llama",
        2,
        lambda generator: generator.generate_batches(
            batches, max_new_tokens=5, logits_processor=LogitsProcessorList([_Counts()])
        ),
    )
    assert [tokens.tolist() for tokens in results[0]] == expected


def test_the_random_generator_goes_on_as_after_generate_on_every_rank() -> None:
    torch.manual_seed(5)
    model("llama").generate(**prompts(), max_new_tokens=8, **SAMPLING)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)

    def body(generator: PipelineGenerator) -> list[float]:
        generator.generate(**prompts(), max_new_tokens=8, in_flight=2, **SAMPLING)
        return torch.get_rng_state().tolist()

    first, second = on_stages("llama", 2, body)
    assert first == second
    assert torch.rand(3).tolist() == expected


def test_batches_of_several_lengths_each_with_its_seed() -> None:
    batches = [prompts(2, 5), prompts(3, 9), prompts(1, 4), prompts(2, 7), prompts(4, 3)]
    seeds = [7, 8, 9, 10, 11]
    expected = []
    for batch, seed in zip(batches, seeds, strict=True):
        torch.manual_seed(seed)
        expected.append(model("llama").generate(**batch, max_new_tokens=9, **SAMPLING).tolist())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    results = on_stages(
        "llama",
        4,
        lambda generator: generator.generate_batches(batches, seeds=seeds, max_new_tokens=9, **SAMPLING),
    )
    for result in results:
        assert [tokens.tolist() for tokens in result] == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_scores_and_logits_are_returned_without_a_cache() -> None:
    options = {
        "max_new_tokens": 4,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = model("llama").generate(**prompts(), **options)
    for result in on_stages("llama", 2, lambda generator: generator.generate(**prompts(), **options)):
        assert type(result) is type(expected)
        assert torch.equal(result.sequences, expected.sequences)
        assert result.past_key_values is None
        for name in ("scores", "logits"):
            for own, its in zip(result[name], expected[name], strict=True):
                assert torch.equal(own, its)


class _Streamer:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, tokens: Tensor) -> None:
        self.seen.append(tokens.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_a_streamer_on_any_rank_gets_what_it_gets_from_generate() -> None:
    expected = _Streamer()
    prompt = prompts(1)["input_ids"]
    model("llama").generate(prompt, max_new_tokens=5, streamer=expected)
    streamers = [_Streamer(), _Streamer()]
    on_stages(
        "llama",
        2,
        lambda generator: generator.generate(
            prompt, max_new_tokens=5, streamer=streamers[generator.comm.rank]
        ),
    )
    assert streamers[0].seen == streamers[1].seen == expected.seen


def test_the_statistics_tell_tokens_calls_and_the_caches_of_a_rank() -> None:
    def body(generator: PipelineGenerator) -> Any:
        generator.generate(prompts()["input_ids"], max_new_tokens=8, min_new_tokens=8, in_flight=2)
        return generator.statistics

    statistics = on_stages("llama", 4, body)
    for one in statistics:
        assert one.new_tokens == 32
        assert one.calls == 16
        assert one.tokens_per_second > 0
    # one layer a stage: keys and values, of 4 rows, 1 head, at most 14 tokens, 8 floats
    assert statistics[0].cache_bytes == 2 * 4 * 14 * 8 * 4


def _in_processes(comm: Comm) -> Any:
    torch.set_num_threads(1)
    pipe = cut_for_generation(model("gpt2"), comm.size, prove=False)
    generator = PipelineGenerator(pipe.build_stage(comm.rank, comm=comm))
    torch.manual_seed(5)
    return generator.generate(**prompts(), in_flight=2, max_new_tokens=6, **SAMPLING).tolist()


def test_processes() -> None:
    torch.manual_seed(5)
    expected = model("gpt2").generate(**prompts(), max_new_tokens=6, **SAMPLING).tolist()
    with patience(150.0):  # each process imports transformers
        outcomes = endings(2, _in_processes)
    for ending in outcomes:
        assert ending.error is None, ending.text
        assert ending.result == expected


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam_search is not decoded over stages.*give num_beams=1"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation is not decoded over stages"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search is not decoded.*give no penalty_alpha"),
        ({"guidance_scale": 1.5}, r"calls the model itself.*leave out the option.*\(guidance_scale\)"),
        ({"assistant_model": object()}, "assistant_model needs a second model"),
        ({"custom_generate": print}, "custom_generate is a loop of its own"),
        ({"prefill_chunk_size": 2}, r"prefill_chunk_size \(2\) is not followed"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions collects"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"in_flight": 2, "return_dict_in_generate": True}, "returns the scores of one batch"),
        ({"streamer": _Streamer()}, "a streamer takes one sequence, and there are 4 in 1 parts"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_followed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        on_stages("llama", 2, lambda generator: generator.generate(**prompts(), max_new_tokens=2, **options))


def test_a_cache_with_tokens_in_it_is_refused() -> None:
    with torch.no_grad():
        outputs = model("llama")(prompts()["input_ids"], use_cache=True)
    name = next(name for name in ("cache", "past_key_values") if name in outputs)  # the latter before 5.24
    ids = torch.cat([prompts()["input_ids"], torch.full((4, 1), 5)], 1)
    with pytest.raises(ArgumentError, match=f"{name} is a DynamicCache with keys and values in it"):
        on_stages(
            "llama",
            2,
            lambda generator: generator.generate(ids, **{name: outputs[name]}, max_new_tokens=2),
        )


def test_several_sampled_batches_need_seeds() -> None:
    with pytest.raises(ArgumentError, match="give seeds, one a batch"):
        on_stages(
            "llama",
            2,
            lambda generator: generator.generate_batches([prompts()] * 2, do_sample=True, max_new_tokens=2),
        )
    with pytest.raises(ArgumentError, match="1 seeds for 2 batches"):
        on_stages(
            "llama",
            2,
            lambda generator: generator.generate_batches([prompts()] * 2, seeds=[1], max_new_tokens=2),
        )


def test_a_model_that_makes_its_own_kind_of_cache_needs_use_cache_false() -> None:
    with pytest.raises(
        NotSupported, match=r"MiniMaxForCausalLM makes a cache of a kind of its own.*use_cache=False"
    ):
        on_stages("minimax", 2, lambda generator: generator.generate(**prompts(), max_new_tokens=2))
    _check(*_both("minimax", 2, 2, use_cache=False))


def test_a_model_that_keeps_its_state_in_its_modules_takes_one_batch_at_a_time() -> None:
    _check(*_both("recurrentgemma", 2))
    with pytest.raises(
        ExecutionError, match=r"keeps 'model\.layers\..*' for its next call.*give in_flight=1"
    ):
        _both("recurrentgemma", 2, 2)


def test_layers_that_share_keys_and_values_over_stages() -> None:
    _check(*_both("gemma3n", 2, 2))


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (prompts(1), prompts(2), "the prompts is"),
        # the last rank's options counted, and these left a rank waiting
        ({}, {"do_sample": True}, "do_sample is left out on rank 0 and True on rank 1"),
        ({"in_flight": 2}, {}, "in_flight is 2 on rank 0 and 1 on rank 1"),
        ({"max_new_tokens": 3}, {"max_new_tokens": 4}, "max_new_tokens is 3 on rank 0 and 4 on rank 1"),
    ],
)
def test_ranks_with_different_arguments_hear_of_it(
    first: dict[str, Any], last: dict[str, Any], message: str
) -> None:
    with pytest.raises(SignatureMismatch, match=message):
        on_stages(
            "llama",
            2,
            lambda generator: generator.generate(
                **{**prompts(), "max_new_tokens": 2, **(last if generator.comm.rank else first)}
            ),
        )


def test_a_captured_stage_is_refused() -> None:
    captured = pipeline(
        model("llama"), (), {"input_ids": torch.ones(2, 4, dtype=torch.int64), "use_cache": False}, stages=2
    )

    def run(comm: Comm) -> None:
        PipelineGenerator(captured.build_stage(comm.rank, comm=comm), comm)

    with pytest.raises(ArgumentTypeError, match="can't keep state between calls"):
        InProcessWorld(2).run(run)
