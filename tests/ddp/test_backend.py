"""The backend by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.ddp import models
from tests.ddp.models import batch, loss_of, seeded
from torch import nn
from torch.fx import Graph, GraphModule

from partita.ddp.backend import partita_ddp
from partita.ddp.inner import resolve_inner
from partita.errors import UsageError


def test_unknown_options_of_the_backend_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown option 'outer': partita_ddp takes inner"):
        partita_ddp(GraphModule(nn.Module(), Graph()), [], options={"outer": 1})
    with pytest.raises(UsageError, match=r"inner is 'inductor'"):
        resolve_inner("cuda")


def test_a_graph_without_replicated_parameters_is_compiled_as_it_is() -> None:
    model = seeded(models.mlp)
    run = torch.compile(copy.deepcopy(model), backend=partita_ddp, options={"inner": "aot_eager"})
    loss_of(run(batch(0, 0))).backward()
    assert torch.equal(run(batch(0, 0)), model(batch(0, 0)))
