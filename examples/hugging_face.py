"""A model of transformers in a pipeline: trained in four stages, saved, trained on in two, and handed back.

    pip install 'partita[hf]'
    torchrun --nproc-per-node 2 examples/hugging_face.py

The loss is the model's own (``labels``). Optimizer and learning rate go into the checkpoint, which does not
know how the model was cut. At the end it is exported for ``from_pretrained``, and each bit is what the uncut
model has learnt without a stop. A tiny configuration and random weights: nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from partita.pipelining import (
    Pipe,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    UncutReference,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)
from partita.pipelining.checkpoints import export_pretrained

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=32, tie_word_embeddings=True, attention_dropout=0.1, use_cache=False, **SIZES)
BATCH, MICROBATCHES, LENGTH, STEPS, STOP = 8, 4, 16, 30, 20


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def batch(step: int, samples: int = BATCH) -> dict[str, Tensor]:
    """Sequences that count upwards from some number."""
    start = torch.randint(32, (samples, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(LENGTH)) % 32
    return {"input_ids": tokens, "labels": tokens}


def cut(stages: int) -> Pipe:
    return pipeline(
        make_model(), (), batch(0, BATCH // MICROBATCHES), stages=stages, microbatches=MICROBATCHES
    )


def optimizer_of(modules: list[nn.Module]) -> tuple[torch.optim.Optimizer, LinearLR]:
    # A tied weight of two stages of this rank is one parameter, which is stepped once.
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return optimizer, LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=STEPS)


def train(runner: Any, optimizer: torch.optim.Optimizer, rate: LinearLR, steps: range) -> list[Tensor]:
    """The mean loss of each step, on the rank that has the last stage."""
    history = []
    for step in steps:
        losses: list[Tensor] = []
        runner.step(**batch(step), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        history += [torch.stack(losses).mean()] if losses else []
    return history


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shared = [tempfile.mkdtemp(prefix="partita-llama-")]  # in earnest: a path that all hosts can reach
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])

    # Four stages, two on each rank, up to a checkpoint.
    pipe = cut(4)
    stages = [pipe.build_stage(rank), pipe.build_stage(rank + 2)]
    optimizer, rate = optimizer_of([stage.module for stage in stages])
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES)
    history = train(schedule, optimizer, rate, range(STOP))
    save_checkpoint(folder / "step20", stages, optimizer, extra={"rate": rate.state_dict()})
    schedule.close()

    # Two stages, one on each rank, from there to the end.
    stage = cut(2).build_stage(rank)
    optimizer, rate = optimizer_of([stage.module])
    rate.load_state_dict(load_checkpoint(folder / "step20", stage, optimizer).extra["rate"])
    rest = Schedule1F1B(stage, MICROBATCHES)
    history += train(rest, optimizer, rate, range(STOP, STEPS))
    save_checkpoint(folder / "step30", stage)
    rest.close()

    # One process makes the folder that transformers reads.
    if rank == 0:
        export_pretrained(folder / "step30", folder / "llama", make_model())
    dist.barrier()
    trained = AutoModelForCausalLM.from_pretrained(folder / "llama")

    # The proof: the uncut model, trained without a stop. `pipe.whole` says which dropout masks a step draws.
    whole = make_model()
    expected = train(
        UncutReference(whole, MICROBATCHES, graph=pipe.whole), *optimizer_of([whole]), range(STEPS)
    )
    state = trained.state_dict()
    different = [name for name, value in whole.state_dict().items() if not torch.equal(value, state[name])]
    if different:
        raise SystemExit(f"rank {rank}: {different} differ from the uncut model's")
    if history:
        assert torch.equal(torch.stack(history), torch.stack(expected))
        print(f"loss {float(history[0]):.3f} -> {float(history[-1]):.3f}")
    print(f"rank {rank}: {len(state)} tensors equal to the uncut model's, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
