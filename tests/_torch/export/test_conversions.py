from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.capture import capture


class Returns(nn.Module):
    """Returns its logits, and a loss that converts them, as causal language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x)
        logits = self.b(h + h.float().tanh() * h.type_as(x))
        loss = logits.float().square().mean()
        return loss, logits, logits.to(torch.float32), logits.double().float()


def test_what_is_converted_to_its_own_dtype_stays_what_it_was_under_autocast() -> None:
    """The tracer took every later use of ``logits`` for one of ``logits.float()``, so that they were float32
    where the model's are bfloat16.
    """
    model, x = Returns(), torch.randn(3, 4)
    graph = capture(copy.deepcopy(model), (x,), prove=True).module
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)
    partita.verify(graph, model, (x,)).check()
    with torch.autocast("cpu", torch.bfloat16):
        partita.verify(graph, model, (x,)).check()


def test_an_alias_of_the_models_own_stays() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x.cos()
            torch.ops.aten.alias(h).mul_(2.0)
            h.float().add_(1.0)  # writes to h
            return h

    x = torch.randn(3)
    graph = capture(Writes(), (x,), prove=True).module
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)) == 1
    assert torch.equal(graph(x), Writes()(x))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
@pytest.mark.parametrize("training", [False, True])
def test_what_dropout_passes_on_in_evaluation_is_apart_from_what_it_was_given(
    kind: type[nn.Module], training: bool, shape: tuple[int, ...]
) -> None:
    """The tracer took every later use of ``h`` for one of the dropout's result, which is the same tensor in
    evaluation only, so that no graph served both modes.
    """

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop = nn.Linear(4, 4), kind(0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            h = self.a(x)
            tied = nn.functional.linear(x, self.drop(self.a.weight)) + self.a.weight.sum()
            return self.drop(h) * 2, h + 1, tied

    model, x = Drops().train(training), torch.randn(shape)
    captured = capture(copy.deepcopy(model), (x,), prove=True)
    assert captured.both_modes
    assert not captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)
    for mode in (True, False):
        partita.verify(captured.module.train(mode), model.train(mode), (x,)).check()
