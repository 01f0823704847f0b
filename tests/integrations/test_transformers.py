"""``PipelineTrainer`` on two processes trains as ``Trainer`` does on one, bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld, patience

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'partita[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'partita[hf]'")

import transformers
from tests.integrations.hugging_face_models import inputs, launched, model

from partita.errors import ArgumentError, NotSupported
from partita.integrations.transformers import PipelineTrainer
from partita.runtime import Comm

SIZE = 22
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")


class Sequences(torch.utils.data.Dataset):
    def __init__(self, name: str) -> None:
        self.rows = inputs(name, SIZE, seed=1)
        if name == "bert":
            self.rows["labels"] = torch.arange(SIZE) % 2
        else:
            self.rows["labels"] = self.rows["input_ids"].clone()
            self.rows["labels"][::3, 5:] = -100  # padding: batches count by their tokens

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: values[number] for name, values in self.rows.items()}


def _as_long_as_needed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that pads to the longest of its samples: lengths differ from batch to batch."""
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    if batch["labels"].dim() == 1:
        return batch
    longest = int((batch["labels"] != -100).sum(1).max())
    return {key: value[:, :longest] for key, value in batch.items()}


def _arguments(folder: str, **options: Any) -> Any:
    return transformers.TrainingArguments(
        folder,
        **{
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "max_grad_norm": 0.5,
            "weight_decay": 0.1,
            "save_strategy": "steps",
            "save_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 3,
            **options,
        },
    )


def _train(trainer: Any, resume: str | None = None) -> bytes:
    trainer.train(resume_from_checkpoint=resume)
    logs = [{key: value for key, value in log.items() if key in LOGGED} for log in trainer.state.log_history]
    return pickle.dumps((logs, trainer.model.state_dict(), trainer.predict(trainer.eval_dataset).predictions))


def _trainer(kind: Any, name: str, folder: str, options: dict[str, Any], **more: Any) -> Any:
    data = Sequences(name)
    more = {"data_collator": _as_long_as_needed, **more}
    return kind(model(name), _arguments(folder, **options), train_dataset=data, eval_dataset=data, **more)


def _piped(comm: Comm, name: str, folder: str, options: dict[str, Any], resume: str | None) -> bytes:
    launched(comm)
    return _train(_trainer(PipelineTrainer, name, folder, options), resume)


def _whole(comm: Comm, name: str, folder: str, options: dict[str, Any]) -> bytes:
    torch.set_num_threads(1)
    return _train(_trainer(transformers.Trainer, name, folder, options))


def _same(results: list[bytes], expected: bytes, logs_from: int = 0) -> None:
    logs, parameters, predictions = pickle.loads(expected)
    for result in results:
        own_logs, own_parameters, own_predictions = pickle.loads(result)
        assert own_logs[logs_from:] == logs[logs_from:]
        assert len([log for log in logs if "eval_loss" in log]) == 2
        assert own_parameters.keys() == parameters.keys()
        for key, value in parameters.items():
            assert torch.equal(own_parameters[key], value), key
        ours, others = (it if isinstance(it, tuple) else (it,) for it in (own_predictions, predictions))
        assert all((one == other).all() for one, other in zip(ours, others, strict=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("gpt2", {}, marks=pytest.mark.dear),
        pytest.param("bert", {"lr_scheduler_type": "cosine"}, marks=pytest.mark.dear),
        ("llama", {"label_smoothing_factor": 0.1}),
    ],
    ids=["gpt2", "bert", "llama, label smoothing"],
)
def test_two_processes_train_as_one(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    with patience(150.0):
        (expected,) = ProcessWorld(1).run(_whole, name, str(tmp_path / "whole"), options)
        results = ProcessWorld(2).run(_piped, name, str(tmp_path / "piped"), options, None)
        _same(results, expected)
        saved = tmp_path / "piped" / "checkpoint-4"
        assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 4
        if name != "gpt2":
            return
        # another number of stages goes on from there, and writes over later checkpoints, as a Trainer does
        resumed = ProcessWorld(3).run(_piped, name, str(tmp_path / "piped"), options, str(saved))
        _same(resumed, expected)


class Longer(Sequences):
    """Samples of more tokens than the others have."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: torch.cat([value, value]) for name, value in super().__getitem__(number).items()}


def _evaluated(comm: Comm, folder: str, kind: Any, named: bool) -> float:
    torch.set_num_threads(1)
    if kind is PipelineTrainer:
        launched(comm)
    trainer = _trainer(kind, "llama", folder, {}, data_collator=transformers.default_data_collator)
    longer = Longer("llama")
    trainer.eval_dataset = {"longer": longer, "as long": trainer.train_dataset} if named else longer
    loss: float = trainer.evaluate()["eval_longer_loss" if named else "eval_loss"]
    return loss


@pytest.mark.dear
@pytest.mark.parametrize("named", [False, True])
def test_evaluation_data_may_have_another_length_than_training_data(tmp_path: Path, named: bool) -> None:
    """The lengths of the training data alone were open, or fixed: the first evaluation was refused."""
    with patience(100.0):
        expected = ProcessWorld(1).run(_evaluated, str(tmp_path), transformers.Trainer, named)
        assert ProcessWorld(2).run(_evaluated, str(tmp_path), PipelineTrainer, named) == 2 * expected


def _refused(comm: Comm, folder: str) -> list[str]:
    launched(comm)
    messages = []
    for options in (
        {"gradient_checkpointing": True},
        {"neftune_noise_alpha": 5.0},
        {"bf16": True},
        {"ddp_find_unused_parameters": True},
        {"optim": "lomo"},
        {"accelerator_config": {"dispatch_batches": True}},
    ):
        with pytest.raises(ArgumentError) as error:
            _trainer(PipelineTrainer, "gpt2", folder, options)
        messages.append(str(error.value))
    with pytest.raises(ArgumentError, match="optimizers is given"):
        _trainer(PipelineTrainer, "gpt2", folder, {}, optimizers=(torch.optim.SGD([torch.zeros(1)]), None))
    with pytest.raises(NotSupported, match="make a trainer for each choice"):
        _trainer(PipelineTrainer, "gpt2", folder, {}).hyperparameter_search()
    return messages


def test_what_a_pipeline_can_not_follow_is_refused_at_once(tmp_path: Path) -> None:
    messages, others = ProcessWorld(2).run(_refused, str(tmp_path))
    assert messages == others
    for message, (name, advice) in zip(
        messages,
        (
            ("activation_checkpointing=True", "'recompute': True"),
            ("neftune_noise_alpha=5.0", "leave it out"),
            ("bf16=True", "dtype=torch.bfloat16"),
            ("ddp_find_unused_parameters=True", "leave it out"),
            ("optim='lomo'", "'adamw_torch'"),
            ("dispatch_batches=True", "leave it out"),
        ),
        strict=True,
    ):
        assert name in message
        assert advice in message


def _alone(comm: Comm, folder: str) -> None:
    with pytest.raises(ArgumentError, match="start the script with torchrun --nproc-per-node 2"):
        _trainer(PipelineTrainer, "gpt2", folder, {})


def test_one_process_is_refused(tmp_path: Path) -> None:
    ProcessWorld(1).run(_alone, str(tmp_path))
