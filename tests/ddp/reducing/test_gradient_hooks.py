"""Where the hooks on gradients can't do their work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import batch, loss_of, seeded
from torch._dynamo.compiled_autograd import _enable

from partita.ddp import partita_ddp, replicate
from partita.errors import ExecutionError


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "compiled"])
def test_compiled_autograd_is_refused(compiled: bool) -> None:
    """Torch's errors about its tracing of the reducer came out of ``backward()``."""

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, inner="aot_eager")
        run = torch.compile(module, backend=partita_ddp) if compiled else module
        loss = loss_of(run(batch(0, 0)))
        with _enable(torch.compile(backend="eager")), pytest.raises(ExecutionError, match="turn it off"):
            loss.backward()
        module.zero_grad()
        loss_of(run(batch(0, 0))).backward()
        assert module[0].weight.grad is not None

    alone(body)
