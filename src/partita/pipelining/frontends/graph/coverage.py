"""Proof that a cut loses nothing: every operation, parameter and buffer of the model is in some stage."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torch.fx import GraphModule

from partita._torch.autograd.region_switches import REGION_SWITCHES
from partita._torch.modules.contents import is_persistent, named_state
from partita._torch.modules.state_dicts import changes_state_dict
from partita.errors import CaptureError, NotProven
from partita.listing import listed
from partita.pipelining.stages.placing.state_of_stage import EXTRA_STATE, clean_name, state_of_stage
from partita.splitter import Piece

__all__ = ["check_operations", "check_state", "unused_state", "warn_of_changed_names", "warn_of_extra_state"]


def check_operations(whole: GraphModule, pieces: Sequence[Piece]) -> None:
    """Check that every operation of a graph is in exactly one piece.

    Raises:
        CaptureError: names the operations that are in none or in several.
    """
    count = Counter(name for piece in pieces for name in piece.node_names)
    wrong = [
        node.name
        for node in whole.graph.nodes
        if node.op.startswith("call_") and node.target not in REGION_SWITCHES and count[node.name] != 1
    ]
    if wrong:
        raise CaptureError(
            f"the operations {listed(wrong)} are not in exactly one stage: this is an error in partita, "
            "please report it with the model"
        )


def check_state(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Check that every parameter and buffer of a model is in a stage, under each of its names.

    Raises:
        CaptureError: names those that no stage holds.
    """
    names = {name for stage in stages for name, _ in named_state(stage)}
    lost = [name for name, _ in named_state(model) if name not in names]
    if lost:
        raise CaptureError(
            f"no stage holds {listed(lost)} of the model: it may have changed its parameters while it was "
            "captured; make them in __init__"
        )


def warn_of_extra_state(model: nn.Module) -> None:
    """Warn of state that is no tensor: a graph holds what forward made of it.

    Warns:
        NotProven: names the modules.
    """
    modules = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if modules:
        warnings.warn(
            f"what get_extra_state() returns of {listed(modules)} is in no stage of a graph: a checkpoint of "
            "the stages is without it, and what forward reads of it stays as it was at the cut. Load it into "
            "the model before the cut, and save it beside, as extra; or keep the modules' own code: "
            'frontend="modules"',
            NotProven,
            stacklevel=3,
        )


def warn_of_changed_names(model: nn.Module) -> None:
    """Warn where the model's own ``state_dict()`` says something else than which tensors it has.

    Warns:
        NotProven: names what differs.
    """
    if not any(map(changes_state_dict, model.modules())):
        return
    saved = {name for name in state_of_stage(model) if name.rpartition(".")[2] != EXTRA_STATE}
    there = {clean_name(name) for name, _ in named_state(model) if is_persistent(model, name)}
    if saved - there or there - saved:
        warnings.warn(
            f"the model's own state_dict() has {listed(sorted(saved - there)) or 'nothing'} in place of "
            f"{listed(sorted(there - saved)) or 'nothing'}, by a hook or an override of which a graph knows "
            "nothing: a checkpoint of the stages has the names of the parameters and buffers themselves, and "
            "is read by such stages only. To save and load as the model does, keep its own code: "
            'frontend="modules"',
            NotProven,
            stacklevel=3,
        )


def unused_state(graphs: Iterable[GraphModule], whole: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that no operation uses.

    Args:
        graphs: all graphs of the model.
        whole: holds its state.
    """
    state = list(named_state(whole))
    read = {node.target for gm in graphs for node in gm.graph.find_nodes(op="get_attr") if node.users}
    used = {id(value) for name, value in state if name in read}
    return [name for name, value in state if id(value) not in used]
