"""Modules inside a stage that something was done to. Whole stages are sharded in ``tests/composition``."""

from __future__ import annotations

import pytest
import torch
from tests.group_of_one import group_of_one
from tests.pipelining.models import PLAIN
from tests.pipelining.running import cut
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from partita.errors import ExecutionError
from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.stages.parts import check_no_sharded_parts, check_parts_are_as_cut


def test_hooks_on_a_part_of_a_captured_stage_are_refused_as_they_would_never_run() -> None:
    """``fully_shard`` of each block, as torch's stages take it, ended in an error of DTensor about mixed
    tensors, and a user's own hook was passed over without a word.
    """
    stage = cut(PLAIN, 2).build_stage(0)
    path, part = next((path, part) for path, part in stage.module.named_modules() if path)
    handle = part.register_forward_hook(lambda *_: None)
    message = f"part '{path}' of stage 0 has hooks .* shard or hook stage.module as a whole"
    with pytest.raises(ExecutionError, match=message):
        stage.begin(1)
    handle.remove()
    stage.module.register_forward_hook(lambda *_: None)
    stage.begin(1)


def test_containers_of_plain_modules_may_have_hooks_which_no_eager_model_runs_either() -> None:
    module = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    module[0].register_forward_hook(lambda *_: None)
    check_parts_are_as_cut(module, 0)


def test_a_part_that_is_sharded_by_itself_is_refused_where_the_models_own_code_runs() -> None:
    """Its weights were sent to the next stage, after they had been given away: an error of storage sizes."""
    pipe = pipeline(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        (torch.ones(1, 2),),
        split_spec={"1": SplitPoint.BEGINNING},
        frontend="modules",
    )
    with group_of_one():
        stage = pipe.build_stage(0)
        fully_shard(stage.module.get_submodule("0"))
        with pytest.raises(
            ExecutionError, match=r"part '0' of stage 0 is sharded by itself, .* as a whole only"
        ):
            stage.begin(1)
        whole = pipe.build_stage(1)
        fully_shard(whole.module)
        check_no_sharded_parts(whole.module, 1)


class Adapted(nn.Module):
    """A layer with an adapter, whose weights can be had as before."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.low = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.low


def test_a_part_that_was_replaced_after_the_cut_is_refused_as_it_would_never_be_called() -> None:
    """A layer with an adapter around it trained as if there were no adapter, or ended in an AttributeError
    about a weight; other weights, parametrizations, and modules beside the parts may come.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING}).build_stage(0)
    part = stage.module.get_submodule("0")
    nn.utils.parametrizations.weight_norm(part)
    part.bias = nn.Parameter(torch.zeros(4))
    stage.module.measures = nn.Dropout()
    stage.begin(1)
    for other in (Adapted(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))):
        setattr(stage.module, "0", other)
        with pytest.raises(
            ExecutionError,
            match=rf"part '0' of stage 0 was replaced by a {type(other).__name__} after the cut",
        ):
            stage.begin(1)
