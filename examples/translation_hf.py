"""A Hugging Face encoder-decoder (T5), trained by two processes and handed back to ``transformers``.

    pip install 'partita[hf]'
    torchrun --nproc-per-node 2 examples/translation_hf.py

The model is the library's own, unchanged: keyword arguments, a padding mask that every attention layer of the
encoder needs, an output object with names, an embedding that encoder, decoder and output layer share. It
learns to turn sequences of letters round. Random weights and a tiny configuration: nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

from partita.pipelining import Schedule1F1B, UncutReference, load_checkpoint, pipeline, save_checkpoint

PAD, END, LETTERS, LENGTH = 0, 1, 20, 8
BATCH, MICROBATCHES, STEPS = 16, 4, 4
CONFIG = T5Config(
    vocab_size=LETTERS,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    pad_token_id=PAD,
    eos_token_id=END,
    decoder_start_token_id=PAD,
    use_cache=False,  # for generation only: in training it would travel from stage to stage for nothing
)


def make_model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(CONFIG)


def batch(step: int, samples: int = BATCH) -> tuple[dict[str, Any], Tensor]:
    """Keyword arguments of the model, and the target. Some sequences are shorter than others."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(2, LETTERS, (samples, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=generator)
    there = torch.arange(LENGTH) < lengths
    source = words.where(there, PAD)
    target = source.flip(1)
    start = torch.full((samples, 1), PAD)
    inputs = {
        "input_ids": source,
        "attention_mask": there.long(),
        "decoder_input_ids": torch.cat([start, target[:, :-1]], 1),
    }
    return inputs, target


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def train(runner: Schedule1F1B | UncutReference, module: nn.Module) -> list[Tensor]:
    """The mean loss of each step, where the last stage is."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    history = []
    for step in range(STEPS):
        inputs, target = batch(step)
        losses: list[Tensor] = []
        runner.step(**inputs, target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        history += [torch.stack(losses).mean()] if losses else []
    return history


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    example = batch(0, BATCH // MICROBATCHES)[0]
    pipe = pipeline(make_model(), (), example, stages=dist.get_world_size(), microbatches=MICROBATCHES)
    stage = pipe.build_stage(rank)
    graph = pipe.whole  # for the proof below; else the rank would keep its own stage only
    del pipe
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    history = train(schedule, stage.module)

    # Evaluate in the pipeline, save, and load into the library's own model.
    stage.module.eval()
    inputs, _ = batch(STEPS)
    output = schedule.eval(**inputs)
    folders = [tempfile.mkdtemp(prefix="partita-t5-")]  # in earnest: a path that all hosts can reach
    dist.broadcast_object_list(folders)
    save_checkpoint(folders[0], stage)
    schedule.close()
    model = T5ForConditionalGeneration(CONFIG).eval()
    load_checkpoint(folders[0], model)

    # The proof, first part: the library's own model, trained on the same microbatches, has the same
    # parameters. The graph says where a step draws which random numbers for dropout.
    whole = make_model()
    expected = train(UncutReference(whole, MICROBATCHES, loss_fn, graph=graph), whole)
    trained = whole.state_dict()
    different = [name for name, value in model.state_dict().items() if not torch.equal(value, trained[name])]
    if different:
        raise SystemExit(f"rank {rank}: {different} differ from the uncut model's")

    # Second part: the library's model, one microbatch at a time, computes what the pipeline did.
    if stage.is_last:
        assert torch.equal(torch.stack(history), torch.stack(expected))
        parts = [
            dict(zip(inputs, part, strict=True))
            for part in zip(*(v.chunk(MICROBATCHES) for v in inputs.values()), strict=True)
        ]
        with torch.no_grad():
            logits = torch.cat([model(**part).logits for part in parts])
        assert torch.equal(logits, output.logits)
        print(
            f"loss {float(history[0]):.3f} -> {float(history[-1]):.3f}, "
            f"out comes a {type(output).__name__} as from the model"
        )
    print(f"rank {rank}: {len(trained)} tensors equal to the uncut model's, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
