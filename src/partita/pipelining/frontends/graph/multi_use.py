"""Parameters that several stages use: copied to each of them, or sent along.

::

    REPLICATE   every stage holds a copy; gradients are summed on the first, which gives the sum to all
    TRANSMIT    the first stage that uses it holds it alone; its value travels with the activations of each
                microbatch, and its gradient back with theirs
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import REGION_SWITCHES
from partita.errors import ArgumentError
from partita.graph.attributes import lookup
from partita.graph.regions import ambient_states
from partita.listing import listed

__all__ = [
    "MultiUseParamSpec",
    "MultiUseParameterConfig",
    "check_multi_use",
    "transmit_parameters",
]


class MultiUseParameterConfig(Enum):
    """What happens to a parameter that several stages use."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig]
"""For all parameters, or by name (any of a tied parameter's names); those left out are replicated."""


def transmit_parameters(whole: GraphModule, assignment: dict[str, int], spec: MultiUseParamSpec) -> None:
    """Let one stage hold each parameter that is to be transmitted, in place: its graph gets a node that
    returns the value, and later stages use that.

    Args:
        assignment: the stage of each node that computes; the new nodes are added.
        spec: that `check_multi_use` has looked at.
    """
    chosen = {
        id(value)
        for name, value in whole.named_parameters(remove_duplicate=False)
        if (spec.get(name) if isinstance(spec, Mapping) else spec) is MultiUseParameterConfig.TRANSMIT
    }
    uses: dict[int, list[Node]] = {}
    for node in whole.graph.find_nodes(op="get_attr"):
        value = lookup(whole, node)
        if isinstance(value, nn.Parameter) and id(value) in chosen:
            uses.setdefault(id(value), []).append(node)
    changed = False
    for nodes in uses.values():
        users = [user for node in nodes for user in node.users if user.name in assignment]
        stages = {assignment[user.name] for user in users}
        if len(stages) > 1:
            _transmit(whole, assignment, nodes, min(stages))
            changed = True
    if changed:
        whole.graph.lint()
        whole.recompile()


def check_multi_use(model: nn.Module, spec: MultiUseParamSpec) -> None:
    """Check that a spec can be followed, before the model is captured.

    Raises:
        ArgumentError: an unknown name, a value that is no `MultiUseParameterConfig`, or two values for one
            tied parameter.
    """
    if isinstance(spec, MultiUseParameterConfig):
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(spec, Mapping):
        raise ArgumentError(
            f"multi_use_param_spec is {spec!r}: give a MultiUseParameterConfig, or a dict of them by "
            "parameter name"
        )
    configs: dict[int, tuple[str, MultiUseParameterConfig]] = {}
    for name, config in spec.items():
        if name not in named:
            raise ArgumentError(
                f"multi_use_param_spec names {name!r}, but the model has no such parameter: it has "
                f"{listed(named)}"
            )
        if not isinstance(config, MultiUseParameterConfig):
            raise ArgumentError(
                f"multi_use_param_spec[{name!r}] is {config!r}: give MultiUseParameterConfig.TRANSMIT or "
                "REPLICATE"
            )
        other, earlier = configs.setdefault(id(named[name]), (name, config))
        if earlier is not config:
            raise ArgumentError(
                f"multi_use_param_spec says {earlier.name} for {other!r} and {config.name} for {name!r}, "
                "which are one parameter: give one of them"
            )


def _transmit(whole: GraphModule, assignment: dict[str, int], nodes: list[Node], owner: int) -> None:
    parameter, *others = nodes
    for other in others:
        other.replace_all_uses_with(parameter)
        whole.graph.erase_node(other)
    # At the end of the stage, so that autograd adds the later stages' gradients up before the owner's own, as
    # it does in the whole model.
    with whole.graph.inserting_after(_last_inherited(whole, assignment, owner) or parameter):
        value = whole.graph.call_function(torch.ops.aten.alias.default, (parameter,))
    value.meta = {key: entry for key, entry in parameter.meta.items() if key == "val"}
    assignment[value.name] = owner
    parameter.replace_all_uses_with(
        value, lambda user: user is not value and assignment.get(user.name, owner) != owner
    )


def _last_inherited(whole: GraphModule, assignment: Mapping[str, int], stage: int) -> Node | None:
    """The last node of a stage that lies in no ``no_grad`` or other region."""
    nodes = list(whole.graph.nodes)
    switches = [position for position, node in enumerate(nodes) if node.target in REGION_SWITCHES]
    runs, _ = ambient_states(nodes, switches)
    ends = [start for start, _ in runs[1:]] + [len(nodes)]
    for (start, state), end in reversed(list(zip(runs, ends, strict=True))):
        if state.grad is None and not state.stack:
            for node in reversed(nodes[start:end]):
                if assignment.get(node.name) == stage:
                    return node
    return None
