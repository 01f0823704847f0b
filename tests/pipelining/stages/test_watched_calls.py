"""Steps under hooks that watch the calls of all modules, as ``FlopCounterMode`` sets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from partita.errors import CaptureError
from partita.pipelining import SplitPoint, get_schedule_class, pipeline
from partita.runtime import Comm, InProcessWorld

TARGET = torch.zeros(4, 3)
BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def _stages(comm: Comm, pipe: Any, name: str) -> Any:
    numbers = [comm.rank, 3 - comm.rank] if name.startswith("ZBV") else [comm.rank]
    built = [copy.deepcopy(pipe).build_stage(number, comm=comm) for number in numbers]
    return built if name.startswith("ZBV") else built[0]


@pytest.mark.parametrize("frontend", ["export", "modules"])
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_flops_are_counted_over_all_ranks(name: str, frontend: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
    whole = copy.deepcopy(model)
    with FlopCounterMode(display=False) as uncut:
        for rows in BATCH.chunk(2):
            (whole(rows).square().mean() / 2).backward()
    stages = 4 if name.startswith("ZBV") else 2
    pipe = pipeline(model, (BATCH[:2],), stages=stages, frontend=frontend)

    def train(comm: Comm) -> tuple[int, dict[str, Tensor]]:
        built = _stages(comm, pipe, name)
        schedule = get_schedule_class(name)(built, 2, nn.functional.mse_loss)
        with FlopCounterMode(display=False) as counter:
            schedule.step(*((BATCH,) if comm.rank == 0 else ()), target=TARGET)
        own = [built] if name == "1F1B" else built
        gradients = {key: p.grad for stage in own for key, p in stage.module.named_parameters()}
        return counter.get_total_flops(), gradients

    results = InProcessWorld(2).run(train)
    assert sum(flops for flops, _ in results) == uncut.get_total_flops() > 0
    gradients = {key: value for _, own in results for key, value in own.items()}
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for key, parameter in whole.named_parameters():
        assert torch.equal(gradients[key], parameter.grad)  # type: ignore[arg-type]


class RemovesItsHook(nn.Module):
    """Sets a hook before the cut, and removes it before or after."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if not hidden.requires_grad:
            return self.last(hidden)  # type: ignore[no-any-return]
        handle = hidden.register_hook(lambda gradient: gradient * 2)
        if self.before:
            handle.remove()
        result: Tensor = self.last(hidden)
        if not self.before:
            handle.remove()
        return result


def test_a_hook_that_is_removed_before_the_cut_is_not_there() -> None:
    torch.manual_seed(0)
    model = RemovesItsHook(before=True)
    whole = copy.deepcopy(model)
    whole(BATCH).square().mean().backward()
    stages = _trained(model)
    assert torch.equal(stages[0]["first.weight"], whole.first.weight.grad)  # type: ignore[arg-type]


def test_a_hook_that_a_later_stage_would_have_to_remove_is_refused() -> None:
    with pytest.raises(CaptureError, match="uses 'remove' of a RemovableHandle that an earlier stage"):
        _trained(RemovesItsHook(before=False))


def _trained(model: nn.Module) -> list[dict[str, Any]]:
    pipe = pipeline(model, (BATCH,), split_spec={"last": SplitPoint.BEGINNING}, frontend="modules")

    def train(comm: Comm) -> dict[str, Any]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = get_schedule_class("1F1B")(stage, 1, nn.functional.mse_loss)
        schedule.step(*((BATCH,) if comm.rank == 0 else ()), target=TARGET)
        return {name: parameter.grad for name, parameter in stage.module.named_parameters()}

    return InProcessWorld(2).run(train)
