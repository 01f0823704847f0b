"""`explain`: the regions of a model that need not run, on a device that need not be there."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from partita.cudagraphs import SavingModel, explain
from partita.errors import CaptureError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


ALL = SavingModel(launch_s=1.0, replay_s=0.0, min_launches=1)


class Net(nn.Module):
    """A copy to the host in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu().sin().cos()
        scale = hidden.sum().cpu()
        return self.last(hidden * scale.to(x.device)).sin().cos()


@without_gpu
def test_without_a_gpu_the_graph_is_judged_as_if_there_was_one() -> None:
    explanation = explain(Net(), (torch.ones(2, 4),), saving=ALL)
    assert explanation.assumed
    assert str(explanation.device) == "cuda:0"
    assert "There is no CUDA device here, so the model was not run" in explanation.note
    (graph,) = explanation.graphs
    assert graph.kind == "inference"
    assert [str(region.device) for region in graph.plan.regions] == ["cuda:0", "cuda:0"]
    first = graph.plan.refusals[0]
    assert first.reason == "its result lies on cpu"
    assert "test_explain.py" in first.source
    assert "hidden.sum().cpu()" in first.source
    assert explanation.launches_saved == sum(region.launches - 1 for region in graph.plan.regions) > 4


@without_gpu
def test_training_has_a_backward_graph_whose_parameters_are_not_copied() -> None:
    explanation = explain(Net(), (torch.ones(2, 4),), train=True, saving=ALL)
    assert [graph.kind for graph in explanation.graphs] == ["forward", "backward"]
    forward, backward = (graph.plan for graph in explanation.graphs)
    # x in, and the hidden values, which the host sees, out; what is saved for backward stays where it is
    assert forward.saved
    assert sum(region.copies for region in forward.regions) <= 4
    assert backward.regions


def test_on_the_cpu_the_model_runs_and_nothing_of_it_changes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.ones(3, 4, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    explanation = explain(model, (x,), train=True, device="cpu")
    assert not explanation.assumed
    assert [graph.kind for graph in explanation.graphs] == ["forward", "backward"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), x))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_keyword_arguments_are_passed_on() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, twice: bool) -> torch.Tensor:
            return (x.sin() * scale).cos().exp() * (2 if twice else 1)

    explanation = explain(Scaled(), (torch.ones(2),), {"scale": torch.ones(2), "twice": True}, device="cpu")
    assert explanation.graphs[0].nodes == 5


@pytest.mark.parametrize("device", ["tpu", "nonsense", "meta"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(CaptureError, match=f"device is '{device}': give 'cuda', 'cuda:1' and so on"):
        explain(nn.Linear(2, 2), (torch.ones(2, 2),), device=device)


def test_a_model_that_can_not_run_is_refused_with_its_own_error() -> None:
    with pytest.raises(CaptureError, match="the model can't be traced on cpu; run it there once without"):
        explain(nn.Linear(3, 2), (torch.ones(2, 2),), device="cpu")


@without_gpu
def test_a_model_without_a_graph_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> int:
            return 3

    with pytest.raises(CaptureError, match=r"torch.compile makes no graph of the model on cpu"):
        explain(Nothing(), (torch.ones(2),), device="cpu")


@without_gpu
def test_a_model_that_branches_on_values_is_explained_up_to_there() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            return x if x.sum() > 0 else x + 1

    explanation = explain(Branches(), (torch.ones(2),))
    assert len(explanation.graphs) == 1
    assert "test_explain.py" in explanation.stopped
    # after a graph break on Python 3.13, tracebacks know the function only
    line = "return x if x.sum() > 0" if sys.version_info < (3, 13) else "def forward(self, x"
    assert line in explanation.stopped


@without_gpu
def test_a_break_in_a_loop_is_explained_though_there_is_no_graph() -> None:
    class Loops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = x.sin()
                torch._dynamo.graph_break()
            return x

    explanation = explain(Loops(), (torch.ones(2),))
    assert not explanation.graphs
    assert "all of forward() runs as Python" in explanation.breaks[0].reason


@without_gpu
def test_a_number_that_an_option_kept_in_the_graph_is_listed() -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    explanation = explain(Scales(), (torch.ones(2),))
    (kept,) = explanation.kept
    assert "x.sum().item()" in kept.source
    assert "torch.compile ends the graph by default" in kept.reason


@without_gpu
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_a_default_configuration_with_its_cache_is_explained(kind: str) -> None:
    """A cache of keys and values was made on the CPU, and its first write met tensors of the meta device."""
    transformers = pytest.importorskip("transformers")
    small = {
        "llama": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
        "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    }
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=32, bos_token_id=1, eos_token_id=2, pad_token_id=0, **small[kind]
    )
    has_decoder = kind == "t5"
    auto = transformers.AutoModelForSeq2SeqLM if has_decoder else transformers.AutoModelForCausalLM
    ids = torch.zeros(1, 4, dtype=torch.long)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if has_decoder else {})}
    explanation = explain(auto.from_config(config).eval(), (), inputs)
    assert not explanation.stopped
    assert explanation.graphs
