"""What `test_two_hosts` runs on each host: trains a cut model, and writes what this rank holds at the end.

``torchrun --nnodes 2 --nproc-per-node 1 ... two_hosts.py FOLDER``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.pipelining.models import TRANSFORMER
from tests.pipelining.running import cut

from partita.pipelining import Schedule1F1B, clip_grad_norm_

STEPS = 2


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = cut(TRANSFORMER, 2).build_stage(rank)
    schedule = Schedule1F1B(stage, 4, TRANSFORMER.loss)
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.1)
    for step in range(STEPS):
        args, _, target = TRANSFORMER.data(8, seed=step)
        losses: list[torch.Tensor] = []
        schedule.step(*args, target=target, losses=losses)
        clip_grad_norm_(schedule, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.detach().clone() for name, value in stage.module.named_parameters()}
    found = {"losses": losses, "state": state, "host": os.environ["PARTITA_HOST"]}
    torch.save(found, folder / f"{rank}.pt")
    schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
