from __future__ import annotations

from tests.runtime import worlds

# Processes are forked off a server that has the imports done.
worlds._CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor",
        "torch.export._trace",
        "torch.nn.parallel",
        "partita.pipelining",
    ]
)
