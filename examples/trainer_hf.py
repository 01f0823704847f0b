"""``transformers.Trainer`` on a model that two processes hold, with one class changed.

    pip install 'partita[hf]'
    torchrun --nproc-per-node 2 examples/trainer_hf.py

``PipelineTrainer`` takes what ``Trainer`` takes: the model as it is, its own ``labels``, gradient
accumulation (the accumulated batches are the microbatches), a learning rate schedule, clipping, logging,
evaluation. A plain ``Trainer`` then trains the same model, whole, on the same data. Random weights and a tiny
configuration: nothing is downloaded.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from partita.integrations.transformers import PipelineTrainer

LETTERS, LENGTH = 16, 12
# Without dropout: a pipeline draws its masks by a rule of its own, which does not depend on the cut.
CONFIG = GPT2Config(
    vocab_size=LETTERS,
    n_positions=LENGTH,
    n_embd=32,
    n_layer=4,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up from anywhere."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = (number + torch.arange(LENGTH)) % LETTERS
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(CONFIG)


def losses(trainer: Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def main() -> None:
    args = TrainingArguments(
        tempfile.mkdtemp(prefix="partita-trainer-"),  # in earnest: a path that all hosts can reach
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="epoch",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = Counting()
    trainer = PipelineTrainer(make_model(), args, train_dataset=data, eval_dataset=data)
    trainer.train()

    # The proof: each process trains the whole model by itself, with the library's own class.
    whole = Trainer(make_model(), args, train_dataset=data, eval_dataset=data)
    whole.train()
    assert losses(trainer) == losses(whole)
    trained = trainer.model.state_dict()
    different = [
        name for name, value in whole.model.state_dict().items() if not torch.equal(value, trained[name])
    ]
    if different:
        raise SystemExit(f"{different} differ from the uncut model's")
    print(f"loss {losses(trainer)[0]:.3f} -> {losses(trainer)[-1]:.3f}")
    print(f"rank {dist.get_rank()}: {len(trained)} tensors equal to the uncut model's, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
