"""What ``model.generate`` does around the model, as a program that calls the model on its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from partita.errors import ArgumentError, NotSupported
from partita.integrations.generation.draws import Draws
from partita.pipelining.blocks.replaying.answers import all_tensors
from partita.pipelining.decoding import ModelCall
from partita.pipelining.decoding.model_call import Program

__all__ = ["PreparedGeneration", "check_model", "generate_program", "prepare"]

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # "cache" since transformers 5.24
_MODES = {
    GenerationMode.BEAM_SEARCH: "num_beams=1, with do_sample=True for variety",
    GenerationMode.BEAM_SAMPLE: "num_beams=1, with do_sample=True for variety",
    GenerationMode.GROUP_BEAM_SEARCH: "num_beams=1 and no num_beam_groups",
    GenerationMode.ASSISTED_GENERATION: "no assistant_model and no prompt_lookup_num_tokens",
    GenerationMode.CONTRASTIVE_SEARCH: "no penalty_alpha",
    GenerationMode.DOLA_GENERATION: "no dola_layers",
}
_OWN_LOOP = ("generate", "_sample", "_prefill")


@dataclass(frozen=True)
class PreparedGeneration:
    """What ``generate`` has worked out from its arguments, before the first call of the model.

    Attributes:
        input_ids: int64[rows, length], the prompt; rows are repeated for ``num_return_sequences``.
        options: ``logits_processor``, ``stopping_criteria``, ``generation_config``.
        model_kwargs: what the model is called with besides the tokens.
    """

    input_ids: Tensor
    options: Mapping[str, Any]
    model_kwargs: dict[str, Any]

    @property
    def config(self) -> Any:
        """The ``GenerationConfig`` that holds."""
        return self.options["generation_config"]


def check_model(model: Any) -> None:
    """Refuse models whose ``generate`` is not the one that is followed here.

    Raises:
        NotSupported: says what to do.
    """
    kind = type(model)
    if not isinstance(model, GenerationMixin):
        raise NotSupported(
            f"{kind.__name__} has no generate of transformers: write the loop as a program for "
            "partita.pipelining.decoding.run_programs, or give a ...ForCausalLM model"
        )
    if model.config.is_encoder_decoder:
        raise NotSupported(
            f"{kind.__name__} is an encoder-decoder model, whose encoder runs outside of the decoding loop: "
            "write the loop as a program for partita.pipelining.decoding.run_programs, which passes "
            "encoder_outputs, or generate with the uncut model"
        )
    for name in _OWN_LOOP:
        if getattr(kind, name) is not getattr(GenerationMixin, name):
            raise NotSupported(
                f"{kind.__name__} has a {name} of its own in place of that of GenerationMixin: write its "
                "loop as a program for partita.pipelining.decoding.run_programs"
            )


def prepare(model: Any, inputs: Any, kwargs: Mapping[str, Any]) -> PreparedGeneration:
    """Let ``model.generate`` work out everything but the tokens.

    Args:
        model: a stage's copy of the model, with one stage's parameters.

    Raises:
        ArgumentError: a way of decoding that is not followed here, or a cache that is not empty.
        ValueError: what ``generate`` refuses.
    """
    # `generate` reads all options by itself, and stops before its first token.
    for name in ("custom_generate", "assistant_model", "streamer", "synced_gpus"):
        if kwargs.get(name) is not None:
            raise ArgumentError(_REFUSED[name])
    prepared: PreparedGeneration = model.generate(inputs, custom_generate=_keep, **kwargs)
    # Ways of decoding that need more than one call of the model a token.
    config = prepared.config
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        wanted = _MODES.get(mode, "greedy search or sampling")
        raise ArgumentError(
            f"{mode.value} is not decoded over stages, since it moves caches between sequences or needs a "
            f"second model: give {wanted}, or generate with the uncut model"
        )
    if config.prefill_chunk_size is not None:
        raise ArgumentError(
            f"prefill_chunk_size ({config.prefill_chunk_size}) is not followed over stages: leave it out, "
            "and give smaller batches with in_flight, which bounds the memory of a prompt too"
        )
    if str(config.cache_implementation).startswith("offloaded"):
        raise ArgumentError(
            f"cache_implementation={config.cache_implementation!r} moves keys and values between devices by "
            "streams of its own: leave it out, since each stage keeps those of its own layers only, and give "
            "smaller batches or more stages where they are still too large"
        )
    # What would be collected of all stages.
    _check_processors(model, prepared)
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ArgumentError(f"{name} collects tensors of all stages: leave it out")
    # A cache begins empty, and is of a kind whose layers can lie on several stages.
    for name in _CACHE_ARGUMENTS:
        cache = prepared.model_kwargs.get(name)
        if cache is not None and not isinstance(cache, Cache):
            raise ArgumentError(
                f"{name} is a {type(cache).__name__}: give a Cache of transformers, such as DynamicCache"
            )
        if isinstance(cache, Cache) and _is_filled(cache):
            raise ArgumentError(
                f"{name} is a {type(cache).__name__} with keys and values in it, and each stage needs those "
                "of its own layers: give the whole text as input_ids, and no cache or an empty one"
            )
    if config.use_cache and not any(prepared.model_kwargs.get(name) is not None for name in _CACHE_ARGUMENTS):
        raise NotSupported(
            f"{type(model).__name__} makes a cache of a kind of its own while it runs, which can't be kept "
            "on the stages: give use_cache=False, or generate with the uncut model"
        )
    return prepared


def _check_processors(model: Any, prepared: PreparedGeneration) -> None:
    """Refuse processors and criteria that call the model themselves, such as that of ``guidance_scale``."""
    for processor in (*prepared.options["logits_processor"], *prepared.options["stopping_criteria"]):
        if any(value is model for value in getattr(processor, "__dict__", {}).values()):
            raise ArgumentError(
                f"{type(processor).__name__} calls the model itself, which is on several ranks here: leave "
                "out the option that asks for it (guidance_scale), or generate with the uncut model"
            )


def _is_filled(cache: Cache) -> bool:
    """Whether its layers have states, also in lists or dicts of them."""
    return any(
        tensor.is_floating_point() and tensor.numel() > 0
        for layer in cache.layers
        for tensor in all_tensors(layer)
    )


_REFUSED = {
    "custom_generate": "custom_generate is a loop of its own around the whole model: write it as a program "
    "for partita.pipelining.decoding.run_programs",
    "assistant_model": "assistant_model needs a second model beside the stages: leave it out",
    "streamer": "a streamer takes one batch: give it to PipelineGenerator.generate, without in_flight",
    "synced_gpus": "synced_gpus is for whole models that are sharded: leave it out",
}


def _keep(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> PreparedGeneration:
    """Take the place of the loop in ``generate``."""
    del model
    options = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
    }
    return PreparedGeneration(input_ids, options, model_kwargs)


def generate_program(model: Any, prepared: PreparedGeneration, draws: Draws) -> Program:
    """Generate tokens for one batch; returns what ``model.generate`` returns, without a cache."""
    config = prepared.config
    process, stop = prepared.options["logits_processor"], prepared.options["stopping_criteria"]
    tokens, model_kwargs = prepared.input_ids, prepared.model_kwargs
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stop)
    going_on = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    keep_scores = config.return_dict_in_generate and config.output_scores
    keep_logits = config.return_dict_in_generate and config.output_logits
    scores: list[Tensor] = []
    logits: list[Tensor] = []

    outputs = yield _call(model, tokens, model_kwargs, first=True)
    while True:
        # the scores of the next token
        model_kwargs = model._update_model_kwargs_for_generation(  # noqa: SLF001 - what subclasses override
            outputs, model_kwargs, is_encoder_decoder=False
        )
        last = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=tokens.device)
        del outputs
        processed = process(tokens, last)
        scores += [processed] if keep_scores else []
        logits += [last] if keep_logits else []
        # the token
        chosen = draws.draw(processed.softmax(dim=-1)) if config.do_sample else processed.argmax(dim=-1)
        if pads:
            pad = config._pad_token_tensor.to(chosen.device)  # noqa: SLF001 - where generate has put it
            chosen = torch.where(going_on, chosen, pad)
        tokens = torch.cat([tokens, chosen[:, None]], dim=-1)
        going_on = going_on & ~stop(tokens, tuple(scores) if keep_scores else None)
        if not going_on.any():
            break
        outputs = yield _call(model, tokens, model_kwargs, report=chosen.cpu())
    result: Any = tokens
    if config.return_dict_in_generate:
        result = GenerateDecoderOnlyOutput(
            sequences=tokens,
            scores=tuple(scores) if keep_scores else None,
            logits=tuple(logits) if keep_logits else None,
        )
    return result


def _call(
    model: Any, tokens: Tensor, model_kwargs: dict[str, Any], *, first: bool = False, report: Any = None
) -> ModelCall:
    """The call of the model for the next token, or with the whole prompt."""
    only_new = {} if first or not model_kwargs.get("use_cache") else {"next_sequence_length": 1}
    inputs = model.prepare_inputs_for_generation(tokens, is_first_iteration=first, **only_new, **model_kwargs)
    state = {name: inputs.pop(name) for name in _CACHE_ARGUMENTS if isinstance(inputs.get(name), Cache)}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    return ModelCall((), inputs | {"return_dict": True}, state, tokens.cpu() if first else report)
