"""What `test_two_hosts` runs on each host: trains a cut model, and writes what this rank holds at the end.

``torchrun --nnodes 2 --nproc-per-node 1 ... two_hosts.py FOLDER [HOST]``

The process on HOST, if there is one, is killed in the middle of the last step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.pipelining.models import TRANSFORMER
from tests.pipelining.running import cut

from partita.errors import PeerFailed
from partita.pipelining import Schedule1F1B, clip_grad_norm_

STEPS = 2


def main(folder: Path, killed: str) -> None:
    torch.set_num_threads(1)
    if killed and killed != os.environ["PARTITA_HOST"]:
        # torchrun sends SIGTERM as soon as it misses the other host's: this one tells first what it saw
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = cut(TRANSFORMER, 2).build_stage(rank)
    schedule = Schedule1F1B(stage, 4, TRANSFORMER.loss)
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.1)
    for step in range(STEPS):
        args, _, target = TRANSFORMER.data(8, seed=step)
        losses: list[torch.Tensor] = []
        if step == STEPS - 1 and killed == os.environ["PARTITA_HOST"]:
            stage.module.register_full_backward_pre_hook(lambda *_: _die(folder))
        try:
            schedule.step(*args, target=target, losses=losses)
        except PeerFailed as error:
            found = {"host": os.environ["PARTITA_HOST"], "text": str(error), "at_s": time.monotonic()}
            torch.save(found, folder / f"{rank}.failed.pt")
            raise
        clip_grad_norm_(schedule, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.detach().clone() for name, value in stage.module.named_parameters()}
    found = {"losses": losses, "state": state, "host": os.environ["PARTITA_HOST"]}
    torch.save(found, folder / f"{rank}.pt")
    schedule.close()
    dist.destroy_process_group()


def _die(folder: Path) -> None:
    (folder / "killed_at_s").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "".join(sys.argv[2:]))
