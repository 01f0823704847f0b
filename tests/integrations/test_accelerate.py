"""``prepare_pippy`` by changing one import: the outputs are the uncut model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld, patience

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'partita[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'partita[hf]'")

from tests.integrations.hugging_face_models import inputs, launched, model

from partita._torch.containers.pytree import flatten
from partita.errors import ArgumentError, ModuleNameError
from partita.integrations.accelerate import prepare_pippy
from partita.runtime import Comm, cut_batch, merge

SIZES = (4, 3, 1)


def _uncut(name: str, samples: int, chunks: int) -> Any:
    """What the uncut model returns for the same microbatches."""
    batch = cut_batch((), inputs(name, samples, seed=samples), min(chunks, samples))
    whole = model(name).eval()
    with torch.no_grad():
        return merge([whole(**kwargs) for _, kwargs in batch.trees()])


def _same(output: Any, expected: Any) -> None:
    assert type(output) is type(expected)
    (leaves, structure), (others, other) = flatten(output), flatten(expected)
    assert structure == other
    for leaf, value in zip(leaves, others, strict=True):
        assert torch.equal(leaf, value)


def _auto(comm: Comm, name: str, gather_output: bool) -> list[str]:
    launched(comm)
    cut = model(name).eval()
    piped = prepare_pippy(cut, "auto", example_kwargs=inputs(name, 2), gather_output=gather_output)
    assert piped is cut
    for samples in SIZES:
        output = piped(**inputs(name, samples, seed=samples))
        if gather_output or comm.rank == 1:
            _same(output, _uncut(name, samples, 2))
        else:
            assert output is None
    return list(cut.hf_split_points)


@pytest.mark.parametrize(
    ("name", "gather_output"),
    [
        pytest.param("gpt2", False, marks=pytest.mark.dear),
        pytest.param("bert", False, marks=pytest.mark.dear),
        pytest.param("t5", True, marks=pytest.mark.dear),
        ("llama", False),
    ],
    ids=["gpt2, last", "bert, last", "t5, all", "llama, last"],
)
def test_outputs_are_the_uncut_models(name: str, gather_output: bool) -> None:
    with patience(120.0):
        points, others = ProcessWorld(2).run(_auto, name, gather_output)
    assert points == others
    assert len(points) == 1


def _by_hand(comm: Comm) -> None:
    launched(comm)
    cut = model("llama").eval()
    for wrong, error, message in (
        (["model.layers.0", "model.layers.1"], ArgumentError, "2 split points make 3 stages"),
        ("model.layers.1", ArgumentError, "give 'auto' or a list of module names"),
        (["model.blocks.1"], ModuleNameError, "no submodule 'blocks'"),
    ):
        with pytest.raises(error, match=message):
            prepare_pippy(cut, wrong, example_args=tuple(inputs("llama", 2).values()))
    with pytest.raises(ArgumentError, match="num_chunks is 0: give at least 1"):
        prepare_pippy(cut, example_args=tuple(inputs("llama", 2).values()), num_chunks=0)
    prepare_pippy(cut, ["model.layers.1"], example_args=tuple(inputs("llama", 2).values()), num_chunks=3)
    # positional arguments count on the first process only
    output = cut(*inputs("llama", 7, seed=7).values()) if comm.rank == 0 else cut()
    if comm.rank == 1:
        _same(output, _uncut("llama", 7, 3))


def test_split_points_by_hand_and_wrong_ones() -> None:
    with patience(120.0):
        ProcessWorld(2).run(_by_hand)


def _alone(comm: Comm) -> None:
    launched(comm)
    whole = model("gpt2").eval()
    forward = whole.forward
    assert prepare_pippy(whole, example_kwargs=inputs("gpt2", 2), gather_output=True) is whole
    assert whole.forward == forward
    assert whole.hf_split_points == []


def test_on_one_process_the_model_stays_as_it_is() -> None:
    ProcessWorld(1).run(_alone)
