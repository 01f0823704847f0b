"""Marking modules as FSDP-managed, so that Dynamo's graphs have the borders that FSDP has."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import nn

from partita._torch.distributed.fsdp_marks import mark

__all__ = ["annotate_modules_for_dynamo"]

_EAGER = (
    "use_orig_params=False: torch.compile makes no graph of such a module and runs it eagerly without a "
    "word. Wrap it with FullyShardedDataParallel(..., use_orig_params=True), or use fully_shard"
)


def annotate_modules_for_dynamo(
    module: nn.Module, ignored_modules: Collection[nn.Module], use_orig_params: bool
) -> None:
    """Mark ``module`` and all modules inside as managed by FSDP, without the ignored ones and those inside.

    FSDP does so itself with what it wraps; this is for wrappers that don't. Dynamo makes the parameters of
    marked modules inputs of the graph, so that each forward uses those that have just been gathered. Torch
    2.13 does so with every module, and 2.11 unless ``inline_inbuilt_nn_modules`` is switched off in Dynamo's
    configuration: there the marks change no graph, and hide no communication.

    Torch's function of that name (private there) marks the children of an ignored module unless they are
    listed too; here ignoring a module ignores all of it.

    Args:
        use_orig_params: as passed to FSDP. With False, torch.compile can't use the module at all.

    Warns:
        UserWarning: ``use_orig_params`` is False.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> annotate_modules_for_dynamo(model, {model[1]}, use_orig_params=True)
    >>> [getattr(child, "_is_fsdp_managed_module", False) for child in model]
    [True, False]
    """
    if not use_orig_params:
        warnings.warn(_EAGER, UserWarning, stacklevel=2)
    ignored = {inner for outer in ignored_modules for inner in outer.modules()}
    for inner in module.modules():
        if inner not in ignored:
            mark(inner, use_orig_params=use_orig_params)
