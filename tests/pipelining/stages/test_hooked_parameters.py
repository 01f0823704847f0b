from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from partita.errors import ExecutionError, NotSupported
from partita.pipelining import PipelineStage, SplitPoint, get_schedule_class, pipeline
from partita.runtime import InProcessWorld


def _step(parameter: torch.Tensor) -> None:
    torch.optim.SGD([parameter], 0.1).step()
    parameter.grad = None


@pytest.mark.parametrize("name", ["GPipe", "ZBH1"])
def test_an_optimizer_in_hooks_is_refused_where_other_microbatches_are_under_way(name: str) -> None:
    """Biases alone were trained so, and autograd saves none: the result was another one without a word."""

    def train(comm: Any) -> None:
        linear = nn.Linear(2, 2)
        linear.weight.requires_grad_(False)
        linear.bias.register_post_accumulate_grad_hook(_step)
        stage = PipelineStage(linear, 0, 1, torch.device("cpu"), comm=comm)
        schedule = get_schedule_class(name)(stage, 2, nn.functional.mse_loss)
        schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2))

    with pytest.raises(ExecutionError, match=r"'bias' of stage 0 was changed .* one of 2 microbatches"):
        InProcessWorld(1).run(train)


def test_with_one_microbatch_it_is_what_it_is_without_a_pipeline() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(2, 2)
    whole = nn.Linear(2, 2)
    whole.load_state_dict(linear.state_dict())
    for module in (linear, whole):
        module.bias.register_post_accumulate_grad_hook(_step)
    nn.functional.mse_loss(whole(torch.ones(4, 2)), torch.zeros(4, 2)).backward()

    def train(comm: Any) -> None:
        stage = PipelineStage(linear, 0, 1, torch.device("cpu"), comm=comm)
        schedule = get_schedule_class("GPipe")(stage, 1, nn.functional.mse_loss)
        schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2))

    InProcessWorld(1).run(train)
    assert torch.equal(linear.bias, whole.bias)


@pytest.mark.parametrize("frontend", ["export", "modules"])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_that_waits_for_gradients_of_two_stages_is_refused(frontend: Any, mode: Any) -> None:
    """Torch calls it in the backward pass of each stage, with a part of what it waits for."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    within = register_multi_grad_hook(tuple(model[0].parameters()), lambda _: None, mode=mode)
    cut: Any = partial(pipeline, model, (torch.ones(1, 2),), split_spec={"1": SplitPoint.BEGINNING})
    assert cut(frontend=frontend).num_stages == 2
    across = register_multi_grad_hook((model[0].bias, model[2].weight), lambda _: None, mode=mode)
    with pytest.raises(NotSupported, match=r"of '0.bias' in stage 0 and of '2.weight' in stage 1"):
        cut(frontend=frontend)
    across.remove()
    assert cut(frontend=frontend).num_stages == 2
    within.remove()


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_such_a_hook_on_a_tied_parameter_is_refused_and_an_ordinary_one_is_not(frontend: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    cut: Any = partial(pipeline, model, (torch.ones(1, 2),), stages=2, frontend=frontend)
    handle = register_multi_grad_hook((model[0].weight,), lambda _: None)
    with pytest.raises(
        NotSupported, match=r"'0.weight', which is tied over the stages 0 and 1.*register_hook"
    ):
        cut()
    handle.remove()
    model[0].weight.register_hook(lambda _: None)
    assert cut().num_stages == 2
