from __future__ import annotations

import torch
from tests.pipelining.models import (
    IN_PLACE,
    OUTPUTS,
    PLAIN,
    REUSED,
    SKIP,
    TRANSFORMER,
    WIDTH,
    Case,
    NoParameters,
)
from tests.pipelining.running import cut


def test_a_stage_knows_its_place_and_what_is_in_flight() -> None:
    stage = cut(PLAIN, 3).build_stage(1)
    assert (stage.index, stage.num_stages, stage.is_first, stage.is_last, stage.in_flight) == (
        1,
        3,
        False,
        False,
        0,
    )
    (name,) = stage.border.inputs
    outputs = stage.forward(0, {name: torch.randn(2, WIDTH)}, train=True)
    assert stage.in_flight == 1
    (output,) = stage.border.outputs
    gradients = stage.backward(0, {output: torch.ones_like(outputs[output])})
    assert gradients[name].shape == (2, WIDTH)
    assert stage.in_flight == 0


def test_forward_without_training_keeps_nothing_and_forget_drops_what_is_kept() -> None:
    stage = cut(PLAIN, 2).build_stage(0)
    stage.forward(0, {"x": torch.randn(2, WIDTH)}, train=False)
    assert stage.in_flight == 0
    stage.forward(0, {"x": torch.randn(2, WIDTH)}, train=True)
    stage.forget()
    assert stage.in_flight == 0


def test_what_was_in_grad_before_stays() -> None:
    stage = cut(TRANSFORMER, 2).build_stage(1)
    kept = {name: torch.ones_like(p) for name, p in stage.module.named_parameters()}
    for name, parameter in stage.module.named_parameters():
        parameter.grad = kept[name].clone()
    inputs = {name: torch.randn(2, 6, WIDTH) for name in stage.border.inputs}
    outputs = stage.forward(0, inputs, train=True)
    (name,) = stage.routes.result_names
    loss = outputs[name].square().mean()
    results = stage.backward(0, {}, (loss, torch.ones_like(loss)))
    (group,) = stage.routes.tied
    assert torch.equal(stage.parameter(group).grad, torch.ones_like(stage.parameter(group)))
    assert results[group.value.name].abs().sum() > 0
    assert not torch.equal(stage.module.get_parameter("norm.weight").grad, kept["norm.weight"])


def test_a_stage_that_writes_to_its_input_leaves_the_senders_tensor_alone() -> None:
    stage = cut(IN_PLACE, 2).build_stage(1)
    (name,) = stage.border.inputs
    assert stage.border.written == {name}
    caller_input = torch.randn(2, WIDTH)
    before = caller_input.clone()
    stage.forward(0, {name: caller_input}, train=True)
    assert torch.equal(caller_input, before)
    assert cut(SKIP, 2).build_stage(1).border.written == frozenset()


def test_outputs_that_the_next_microbatch_overwrites_are_handed_out_as_copies() -> None:
    stage = cut(REUSED, 2).build_stage(0)
    assert len(stage.border.reused) == 1
    (name,) = stage.border.reused
    first = stage.forward(0, {"x": torch.zeros(2, WIDTH)}, train=True)[name]
    kept = first.clone()
    stage.forward(1, {"x": torch.ones(2, WIDTH)}, train=True)
    assert torch.equal(first, kept)


def test_the_device_is_that_of_parameters_or_else_of_buffers_or_the_cpu() -> None:
    pipe = cut(Case("none", NoParameters), 3)
    stage = pipe.build_stage(1)
    assert stage.device == torch.device("cpu")
    moved = pipe.build_stage(0, "meta")
    assert moved.device == torch.device("meta")


def test_results_take_the_models_own_structure() -> None:
    stage = cut(OUTPUTS, 2).build_stage(1)
    outputs = {name: torch.full((2,), float(number)) for number, name in enumerate(stage.routes.result_names)}
    result = stage.results(outputs, stage.routes)
    assert list(result) == ["out", "early", "given", "n", "rows"]
    assert (result["n"], result["out"][1]) == (3, None)
