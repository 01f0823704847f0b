from __future__ import annotations

import torch

from partita._torch.autograd.grad_scaler import found_inf, set_found_inf


def _scaled() -> tuple[torch.amp.GradScaler, torch.optim.Optimizer, torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.ones(2))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    return scaler, optimizer, weight


def test_an_infinite_gradient_is_found() -> None:
    scaler, optimizer, weight = _scaled()
    scaler.unscale_(optimizer)
    assert not found_inf(scaler, optimizer)
    scaler, optimizer, weight = _scaled()
    weight.grad[0] = float("inf")
    scaler.unscale_(optimizer)
    assert found_inf(scaler, optimizer)


def test_a_verdict_from_elsewhere_skips_the_step_and_shrinks_the_scale() -> None:
    scaler, optimizer, weight = _scaled()
    scaler.unscale_(optimizer)
    set_found_inf(scaler, optimizer, True)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(2))
    assert scaler.get_scale() == 2.0


def test_without_an_optimizer_the_verdict_is_kept_for_the_update() -> None:
    scaler, _, _ = _scaled()
    set_found_inf(scaler, None, True)
    assert found_inf(scaler, None)
    scaler.update()
    assert scaler.get_scale() == 2.0
