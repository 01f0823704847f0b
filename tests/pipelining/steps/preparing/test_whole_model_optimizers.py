"""Optimizers that need all parameters of a model are refused on a rank that has some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Optimizer

from partita.errors import ExecutionError
from partita.pipelining import Schedule1F1B, SplitPoint, clip_grad_norm_, pipeline
from partita.runtime import Comm, InProcessWorld


class Lamb(SGD):
    """Stands for timm's."""

    def __init__(self, parameters: Any, max_grad_norm: float | None) -> None:
        super().__init__(parameters, 0.1)
        for group in self.param_groups:
            group["max_grad_norm"] = max_grad_norm


class Prodigy(SGD):
    """Stands for prodigyopt's, and without ``fsdp_in_use`` for pytorch_optimizer's."""

    def __init__(self, parameters: Any, **options: bool) -> None:
        super().__init__(parameters, 0.1)
        for group in self.param_groups:
            group |= {"d": 1e-6, "growth_rate": 1.0, **options}


class Clips(SGD):
    """One of the user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        return super().step(closure)


class Sam(Optimizer):
    """A step in two methods, of which the second steps another optimizer: torch tells of no step of this."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = SGD(self.param_groups, 0.1)

    @torch.no_grad()
    def first_step(self) -> None:
        own = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for parameter in own:
            self.state[parameter]["before"] = parameter.clone()
            parameter += parameter.grad / norm

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, state in self.state.items():
            parameter.copy_(state["before"])
        self.base.step()


def _train(new_optimizer: Callable[[Any], Optimizer], placement: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.END}, prove=False)

    def body(comm: Comm) -> None:
        stages = [pipe.build_stage(i, comm=comm) for i, rank in enumerate(placement) if rank == comm.rank]
        schedule = Schedule1F1B(stages, 2, nn.functional.mse_loss)
        optimizer = new_optimizer([value for stage in stages for value in stage.module.parameters()])
        schedule.step(x, target=x)
        before = [value.detach().clone() for stage in stages for value in stage.module.parameters()]
        try:
            if isinstance(optimizer, Sam):
                optimizer.first_step()
                optimizer.second_step()
            else:
                optimizer.step(_loss)
        except ExecutionError:
            after = [value for stage in stages for value in stage.module.parameters()]
            assert all(map(torch.equal, before, after))
            raise

    InProcessWorld(max(placement) + 1).run(body)


def _loss() -> Tensor:
    return torch.zeros(())


@pytest.mark.parametrize(
    ("new_optimizer", "message"),
    [
        (LBFGS, r"LBFGS looks for one direction .* has those of stages \[\d\] of 2 alone.*such as AdamW"),
        (lambda own: Lamb(own, 0.5), r"Lamb clips .*\(max_grad_norm=0.5\).*clip_grad_norm_\(schedule, 0.5\)"),
        (lambda own: Prodigy(own, fsdp_in_use=False), "Prodigy estimates its learning rate from all"),
        (Prodigy, "Prodigy estimates its learning rate from all"),
        (Clips, r"Clips steps a parameter by what other parameters .* are.*has those of stages \[\d\] of 2"),
        (Sam, r"Sam steps a parameter by what other parameters .* are.*has those of stages \[\d\] of 2"),
    ],
    ids=["LBFGS", "Lamb", "Prodigy", "Prodigy of pytorch_optimizer", "Clips", "Sam"],
)
def test_an_optimizer_that_needs_all_parameters_is_refused_before_it_steps(
    new_optimizer: Callable[[Any], Optimizer], message: str
) -> None:
    """Ranks trained to other weights than those of the uncut model, without a word."""
    with pytest.raises(ExecutionError, match=message):
        _train(new_optimizer, (0, 1))
    _train(new_optimizer, (0, 0))  # one rank has all


@pytest.mark.parametrize(
    "new_optimizer",
    [AdamW, Adafactor, lambda own: Lamb(own, None), lambda own: Prodigy(own, fsdp_in_use=True)],
    ids=["AdamW", "Adafactor", "Lamb", "Prodigy"],
)
def test_others_are_not(new_optimizer: Callable[[Any], Optimizer]) -> None:
    _train(new_optimizer, (0, 1))


def test_one_that_clips_over_all_stages_in_its_step_trains() -> None:
    """Its trial, which every rank makes for itself, may not call the others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), split_spec={"1": SplitPoint.END}, prove=False)

    def body(comm: Comm) -> list[Tensor]:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)

        class ClipsOverAll(SGD):
            def step(self, closure: Any = None) -> Any:
                clip_grad_norm_(schedule, 0.01)
                return super().step(closure)

        optimizer: Optimizer = (ClipsOverAll if comm.rank else SGD)(stage.module.parameters(), 0.1)
        schedule.step(x, target=x)
        if not comm.rank:
            clip_grad_norm_(schedule, 0.01)
        optimizer.step()
        return [value.detach() for value in stage.module.parameters()]

    (first, second), loss = InProcessWorld(2).run(body), nn.functional.mse_loss
    sum(loss(model(half), half) / 2 for half in x.split(2)).backward()  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    SGD(model.parameters(), 0.1).step()
    assert all(map(torch.equal, [*first, *second], model.parameters()))


def test_an_optimizer_of_another_model_is_left_alone_and_so_is_any_when_the_schedule_is_gone() -> None:
    own: list[nn.Parameter] = []

    def keep(parameters: list[nn.Parameter]) -> Optimizer:
        own.extend(parameters)
        other = LBFGS([nn.Parameter(torch.zeros(2))])
        other.step(_loss)
        return AdamW(parameters)

    _train(keep, (0, 1))
    LBFGS(own).step(_loss)
