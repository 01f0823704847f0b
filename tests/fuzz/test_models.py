"""A step of ranks equals the eager model over the microbatches bit for bit, or is refused with a word."""

from __future__ import annotations

import collections
import copy
import os
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from tests.fuzz.models import CHANNELS, LOSSES, SIDE, Program, RandomModel, programs
from torch import Tensor, nn

from partita.errors import CaptureError, ExecutionError, InfeasiblePlan, PeerFailed
from partita.pipelining import get_schedule_class, pipeline
from partita.runtime import Comm, InProcessWorld

EXAMPLES = os.environ.get("PARTITA_FUZZ_EXAMPLES")
SETTINGS = settings(
    max_examples=max(1, int(EXAMPLES or 20) // 20),  # each takes as long as 20 graphs of the other
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # making a failing program smaller takes an hour: it is told as it is
    print_blob=True,
)
MICROBATCHES = 4
OUTCOMES: collections.Counter[str] = collections.Counter()


@SETTINGS
@given(programs())
def test_a_step_of_ranks_is_the_eager_model(program: Program) -> None:
    torch.manual_seed(0)
    model = RandomModel(program)
    x, target = torch.randn(8, CHANNELS, SIDE, SIDE), torch.randn(8, CHANNELS, SIDE, SIDE)
    try:
        pipe = pipeline(model, (x[:2].requires_grad_(program.wants_input),))
    except (CaptureError, InfeasiblePlan) as refusal:
        _note(f"refused: {type(refusal).__name__}")
        assume(False)
    assume(pipe.num_stages == len(program.placement))  # what is not used is not there
    eager = copy.deepcopy(model)
    own = x.clone().requires_grad_(program.wants_input)
    outputs = [
        _eager_pass(eager, program, *parts) for parts in zip(own.split(2), target.split(2), strict=True)
    ]
    given_x = x.clone().requires_grad_(program.wants_input)

    def body(comm: Comm) -> tuple[Any, dict[str, Tensor | None], dict[str, Tensor]]:
        mine = copy.deepcopy(pipe)
        stages = [
            mine.build_stage(stage, comm=comm)
            for stage, rank in enumerate(program.placement)
            if rank == comm.rank
        ]
        schedule = get_schedule_class(program.schedule)(stages, MICROBATCHES, LOSSES[program.loss])
        output = schedule.step(given_x, target=target)
        modules = [stage.module for stage in stages]
        return output, _gradients(modules), {k: v for module in modules for k, v in module.named_buffers()}

    try:
        ranks = InProcessWorld(max(program.placement) + 1).run(body)
    except (ExecutionError, PeerFailed) as refusal:
        if "takes another way now" not in str(refusal):
            raise
        _note("refused: a microbatch goes another way")
        assume(False)
    _same("output", next(output for output, _, _ in ranks if output is not None), torch.cat(outputs))
    if program.wants_input:
        _same("gradient of the input", given_x.grad, own.grad)
    wanted, buffers = _gradients([eager]), dict(eager.named_buffers())
    for _, gradients, state in ranks:
        for name, gradient in gradients.items():
            _same(f"gradient of {name}", gradient, wanted[name])
        for name, buffer in state.items():
            _same(name, buffer, buffers[name])
    _note(f"equal under {program.schedule}")


def _eager_pass(eager: nn.Module, program: Program, x: Tensor, target: Tensor) -> Tensor:
    output = eager(x)
    (LOSSES[program.loss](output, target) / MICROBATCHES).backward()
    return output.detach()


def _gradients(modules: list[nn.Module]) -> dict[str, Tensor | None]:
    return {name: value.grad for module in modules for name, value in module.named_parameters()}


def _same(what: str, found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected, what
    else:
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), (what, (found - expected).abs().max())


def _note(outcome: str) -> None:
    OUTCOMES[outcome] += 1
    event(outcome)
