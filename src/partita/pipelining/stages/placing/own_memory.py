"""Memory of a rank's own, where ranks would share tensors: in one process, or by ``torch.multiprocessing``.

On a network, a tied weight of two stages is two tensors; so it must be here.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn

from partita._torch.tensors.storage import has_memory
from partita.errors import ExecutionError
from partita.pipelining.stages.placing.materialise import tensor_slots
from partita.runtime import Comm, InProcessComm
from partita.runtime.comms.shared_memory import leave_shared_memory

__all__ = ["with_own_memory"]


def with_own_memory(module: nn.Module, comm: Comm | None, *, wrapped: bool = False) -> nn.Module:
    """``module`` itself, or, where another rank of an `InProcessWorld` holds some of its tensors, a copy with
    copies of these. Two stages on one rank go on sharing theirs. What other processes can write to is moved
    out of their reach.

    Args:
        wrapped: the module is inside another one, so that it can't be replaced by a copy.

    Raises:
        ExecutionError: a wrapped module would have to be copied.
    """
    if not isinstance(comm, InProcessComm):
        leave_shared_memory(tensor for *_, tensor in tensor_slots(module))
        return module
    tensors: dict[int, Tensor] = {}
    for _, _, name, tensor in tensor_slots(module):
        if id(tensor) in tensors:
            continue
        tensors[id(tensor)] = comm.own(tensor) if has_memory(tensor) else tensor
        if wrapped and tensors[id(tensor)] is not tensor:
            raise ExecutionError(
                f"{name!r} is held by another rank of this process too, and a wrapped module can't be given "
                "a copy of it: build the stage first, then wrap stage.module"
            )
    if all(id(tensor) == key for key, tensor in tensors.items()):
        return module
    own: nn.Module = copy.deepcopy(module, dict[int, object](tensors))
    return own
