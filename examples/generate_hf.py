"""Text from a model that two processes hold: each keeps its layers, and the cache of its layers.

    pip install 'partita[hf]'
    torchrun --nproc-per-node 2 examples/generate_hf.py

A tiny Llama with random weights (nothing is downloaded) is cut between its layers. ``generate`` of a
`PipelineGenerator` takes what ``model.generate`` takes: left-padded prompts, sampling, processors, static
caches. With ``in_flight`` the batch is cut into parts that take turns, so that both processes have something
to do. The uncut model then generates the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from partita.integrations.generation import PipelineGenerator, cut_for_generation
from partita.runtime import ProcessGroupComm

WORDS, PAD, END = 64, 0, 3
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=PAD,
    bos_token_id=1,
    eos_token_id=END,
)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_p": 0.9, "temperature": 1.2, "repetition_penalty": 1.1},
    "static cache": {"cache_implementation": "static"},
}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def make_prompts() -> dict[str, Tensor]:
    """Four prompts of three lengths, padded on the left as a tokenizer with ``padding_side="left"`` does."""
    ids = torch.randint(4, WORDS, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, 3, 5, 0]):
        ids[row, :padding], mask[row, :padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def main() -> None:
    dist.init_process_group("gloo")
    with ProcessGroupComm.from_group() as comm:
        uncut = make_model()
        pipe = cut_for_generation(uncut, stages=comm.size)
        generator = PipelineGenerator(pipe.build_stage(comm.rank, comm=comm))
        del pipe  # but for the uncut model, which is kept to compare, only this process's stage stays
        for way, options in WAYS.items():
            torch.manual_seed(7)
            tokens = generator.generate(**make_prompts(), in_flight=comm.size, max_new_tokens=16, **options)
            torch.manual_seed(7)
            expected = uncut.generate(**make_prompts(), max_new_tokens=16, **options)
            assert tokens.tolist() == expected.tolist(), (way, tokens, expected)
            if comm.rank == comm.size - 1:
                statistics = generator.statistics
                print(
                    f"{way}: {statistics.new_tokens} tokens, equal to the uncut model's, "
                    f"{statistics.tokens_per_second:.0f} a second, "
                    f"{statistics.cache_bytes:,} bytes of cache on this rank"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
