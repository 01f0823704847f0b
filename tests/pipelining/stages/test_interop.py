"""Our stages under torch's own schedules."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from tests.pipelining.models import NORMED, OUTPUTS, PLAIN, SKIP, TRANSFORMER, Case
from tests.pipelining.running import assert_equal
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed import pipelining as theirs

from partita.errors import ArgumentError
from partita.pipelining import MultiUseParameterConfig, Pipe, PipelineStage, SplitPoint, pipeline
from partita.pipelining.stages import to_torch_stage
from partita.runtime import Comm

TRANSMIT = MultiUseParameterConfig.TRANSMIT
CASES = {case.name: case for case in (SKIP, replace(TRANSFORMER, name="tied"))}


def _cut(case: Case, stages: int) -> Pipe:
    args, kwargs, _ = case.data(2)
    return pipeline(case.model(), args, kwargs, case.split_spec(stages), multi_use_param_spec=TRANSMIT).eval()


def _under_torch(comm: Comm, pipes: dict[str, bytes]) -> bytes:
    torch.set_num_threads(1)
    results = []
    for name, pickled in pipes.items():
        for kind in (theirs.ScheduleGPipe, theirs.Schedule1F1B):
            case = CASES[name]
            small, kwargs, _ = case.data(2)
            args, _, target = case.data(8)
            stage = to_torch_stage(
                pickle.loads(pickled).build_stage(comm.rank), mb_args=small, mb_kwargs=kwargs
            )
            schedule, losses = kind(stage, 4, loss_fn=case.loss), list[Tensor]()
            if comm.rank == 0:
                schedule.step(*args)
            else:
                schedule.step(target=target, losses=losses, return_outputs=False)
            gradients = {n: p.grad for n, p in stage.submod.named_parameters(remove_duplicate=False)}
            results.append((losses, gradients))
    return pickle.dumps(results)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_torchs_schedules_run_our_stages_with_the_results_of_the_whole_model() -> None:
    names = tuple(CASES)
    ends = endings(2, _under_torch, {name: pickle.dumps(_cut(CASES[name], 2)) for name in names})
    assert [ending.error for ending in ends] == [None, None], "\n".join(ending.text for ending in ends)
    first, second = (pickle.loads(ending.result) for ending in ends)
    for number, name in enumerate(name for name in names for _ in range(2)):
        case = CASES[name]
        model = case.model().eval()
        args, kwargs, target = case.data(8)
        losses = []
        for part in range(4):
            loss = case.loss(
                model(*(value.chunk(4)[part] for value in args), **kwargs), target.chunk(4)[part]
            )
            (loss / 4).backward()
            losses.append(loss.detach())
        assert_equal([loss.detach() for loss in second[number][0]], losses, name)
        expected = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
        gradients = first[number][1] | second[number][1]
        assert gradients.keys() == expected.keys()
        assert_equal(gradients, expected, name)


@pytest.mark.usefixtures("alone")
def test_it_has_the_stages_own_state_under_its_own_names_and_modes() -> None:
    pipe = pipeline(NORMED.model(), NORMED.data(2)[0], split_spec=NORMED.split_spec(2))
    ours = pipe.build_stage(0)
    stage = to_torch_stage(ours, mb_args=NORMED.data(2)[0])
    assert_equal(dict(stage.submod.state_dict()), dict(ours.module.state_dict()))
    assert dict(stage.submod.named_parameters()).keys() == dict(ours.module.named_parameters()).keys()
    stage.submod.eval()
    assert not ours.module.training
    assert not ours.module.get_submodule("a").training
    assert (stage.stage_index, stage.num_stages, stage.is_first) == (0, 2, True)


@pytest.mark.usefixtures("alone")
def test_a_stage_of_a_plain_module_is_torchs_with_that_module() -> None:
    module = nn.Linear(2, 2)
    stage = to_torch_stage(PipelineStage(module, 0, 1, "cpu"))
    assert stage.submod is module
    schedule = theirs.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    output = schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2))
    assert torch.equal(output, module(torch.ones(4, 2)))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            TRANSFORMER,
            r"'embedding\.weight' is in stages \[0, 1\], and torch's schedules do not add its gradients up",
        ),
        (
            OUTPUTS,
            "the model returns a dict that is no tensor or tuple of tensors, and torch's schedules take",
        ),
        (PLAIN, "cut for any batch size, and torch's schedules need one: pass the arguments of a microbatch"),
    ],
)
def test_what_would_be_wrong_there_is_refused(case: Case, message: str) -> None:
    pipe = pipeline(case.model(), case.data(2)[0], split_spec=case.split_spec(2))
    example = None if case is PLAIN else case.data(2)[0]
    with pytest.raises(ValueError, match=message):
        to_torch_stage(pipe.build_stage(1), mb_args=example)


def test_a_stage_that_runs_the_models_own_code_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = pipeline(model, (torch.zeros(1, 2),), split_spec={"0": SplitPoint.END}, frontend="modules")
    with pytest.raises(
        ArgumentError, match=r"hands on more than tensors, .* run it with a schedule of partita"
    ):
        to_torch_stage(pipe.build_stage(0))
