"""Inputs of Hugging Face models with random values."""

from __future__ import annotations

import torch

from partita.cli.models.hugging_face import build_hugging_face
from partita.cli.models.hugging_face_config import HuggingFaceModel
from partita.cli.models.hugging_face_values import with_random_values


def test_tokens_and_labels_are_of_the_vocabulary_and_the_model_runs() -> None:
    settings = ("n_layer=1", "n_embd=8", "n_head=1", "vocab_size=30")
    model = HuggingFaceModel("gpt2", settings=settings, dtype="float32", batch=2, longest=16)
    built = with_random_values(build_hugging_face(model, "cpu"))
    tokens = built.kwargs["input_ids"]
    assert tokens.shape == (2, 16)
    assert tokens.unique().numel() > 5
    assert int(tokens.max()) < 30
    assert not torch.equal(tokens, built.kwargs["labels"])
    assert bool(torch.isfinite(built.model(**built.kwargs).loss))


def test_labels_of_whole_samples_are_classes() -> None:
    settings = ("hidden_size=8", "num_hidden_layers=1", "num_attention_heads=1", "intermediate_size=8")
    small = ("image_size=8", "patch_size=4")
    model = HuggingFaceModel("vit", settings=(*settings, *small), dtype="float32", batch=4)
    built = with_random_values(build_hugging_face(model, "cpu"))
    assert built.kwargs["pixel_values"].unique().numel() > 100
    assert int(built.kwargs["labels"].max()) < built.model.config.num_labels
    assert bool(torch.isfinite(built.model(**built.kwargs).loss))
