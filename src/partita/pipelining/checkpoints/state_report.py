"""Which stage of a pipe has which parameters and buffers, and whether any was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import nn
from torch.fx import Graph, GraphModule

from partita._torch.modules.contents import named_state
from partita.errors import CheckpointError
from partita.graph.attributes import lookup
from partita.listing import listed
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.interface.two_modes import TwoModes
from partita.pipelining.stages.placing.state_of_stage import state_of_stage

__all__ = ["StateReport", "state_report"]


@dataclass(frozen=True)
class StateReport:
    """What `state_report` returns.

    Attributes:
        stages: for each name of a parameter or buffer the stages that hold it, ascending: all names in a
            checkpoint of the stages, and those of non-persistent buffers.
        unused: names that no operation of a captured model uses, with the stage that holds them, so that a
            checkpoint has them.
        missing: names in the model's own ``state_dict()`` that no stage has.
        surplus: names in a stage's ``state_dict()`` that are not in the model's.
    """

    stages: Mapping[str, tuple[int, ...]]
    unused: Mapping[str, int]
    missing: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()

    def check(self) -> StateReport:
        """Return the report itself, if nothing is missing or surplus.

        Raises:
            CheckpointError: a checkpoint of the stages would have other names than one of the model.
        """
        if self.missing:
            raise CheckpointError(
                f"no stage has {listed(self.missing)} of the model's state_dict(): state that is no "
                "parameter or buffer (get_extra_state, a hook of state_dict) is not captured; save it "
                "beside, as extra"
            )
        if self.surplus:
            raise CheckpointError(
                f"stages have {listed(self.surplus)} in their state_dict(), which the model's own leaves "
                "out: was the report made with the model that was cut?"
            )
        return self


def state_report(pipe: Pipe, model: nn.Module | None = None) -> StateReport:
    """Report which stage holds which parameters and buffers, and which of them are unused.

    Args:
        model: the model that was cut, whose state dict is compared with the stages'.

    >>> import torch
    >>> from partita.pipelining import SplitPoint, pipeline
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model.spare = nn.Parameter(torch.zeros(1))
    >>> pipe = pipeline(model, (torch.zeros(1, 2),), split_spec={"0": SplitPoint.END})
    >>> report = state_report(pipe, model).check()
    >>> report.unused, report.stages["1.bias"]
    ({'spare': 0}, (1,))
    """
    modules = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    stages: dict[str, list[int]] = {}
    unused: dict[str, int] = {}
    used = {identity for module in modules for identity in _used_tensors(module)}
    for index, module in enumerate(modules):
        for name, tensor in named_state(module):
            stages.setdefault(name, []).append(index)
            if id(tensor) not in used:
                unused.setdefault(name, index)
    there = {name for module in modules for name in state_of_stage(module)}
    wanted = there if model is None else state_of_stage(model).keys()
    return StateReport(
        {name: tuple(indices) for name, indices in sorted(stages.items())},
        dict(sorted(unused.items())),
        tuple(sorted(wanted - there)),
        tuple(sorted(there - wanted)),
    )


def _used_tensors(module: nn.Module) -> Iterator[int]:
    """The identities of the tensors that a stage's graphs, and the modules that they call, refer to; of all
    its tensors where it runs the model's own code.
    """
    graphs: list[Graph] = [module.graph] if isinstance(module, GraphModule) else []
    if isinstance(module, TwoModes):
        graphs = [one.graph for one in module.graphs.values()]
    if not graphs:
        yield from (id(tensor) for _, tensor in named_state(module))
    for node in chain.from_iterable(graph.nodes for graph in graphs):
        if node.op in ("get_attr", "call_module"):
            value = lookup(module, node)
            yield from _used_tensors(value) if isinstance(value, nn.Module) else [id(value)]
