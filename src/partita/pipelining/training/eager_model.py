"""The user's own model, run with the random numbers that its captured graph has in a step.

In a graph each random call is seeded by its site. The model has no sites, but runs the same operators in the
same order. So the graph is run first, to record which of its draws begin a site::

    graph    enter_site(0)  bernoulli_  bernoulli_   enter_site(1)  rand         (an LSTM's dropout, rand)
    model    ^ seed 0       bernoulli_  bernoulli_   ^ seed 1       rand
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from partita._torch.containers.pytree import tree_map
from partita._torch.modules.contents import named_state
from partita._torch.operators.draws import before_draws
from partita._torch.tensors.detached_copy import detached_leaf_copy
from partita.errors import ExecutionError
from partita.pipelining.stages.placing.relocate import relocated
from partita.runtime import RandomKey, enter_site, keyed
from partita.runtime.host_generators import keyed_generators

__all__ = ["EagerModel"]


class EagerModel:
    """Calls a model with the random numbers of its graph.

    Args:
        model: the user's own.
        graph: its captured graph, on whatever device; None where it draws no random numbers.
    """

    def __init__(self, model: nn.Module, graph: nn.Module | None) -> None:
        self._model = model
        self._graph = None if graph is None else _beside(model, graph)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: RandomKey) -> Any:
        """Run the model.

        Raises:
            ExecutionError: it draws other random numbers than its graph, or there is no graph.
        """
        draws = iter(self._draws(args, kwargs, key))

        def seed(name: str) -> None:
            if self._graph is None:
                raise ExecutionError(
                    f"the model draws random numbers ({name}), which a step draws by a rule of its own: give "
                    "graph=pipe.whole, which says where; or leave them out (dropout 0, or model.eval())"
                )
            expected, site = next(draws, ("nothing", None))
            if name != expected:
                raise ExecutionError(
                    f"the model draws random numbers by {name} where its graph draws by {expected}: the "
                    "graph is not that of this model"
                )
            if site is not None:
                enter_site(site)

        with keyed(key), keyed_generators(), before_draws(seed):
            output = self._model(*args, **kwargs)
        for name, _ in draws:
            raise ExecutionError(
                f"the graph draws random numbers by {name} where the model draws none: the graph is not that "
                "of this model"
            )
        return output

    def backward_pass(self) -> AbstractContextManager[object]:
        """Refuse random numbers during a backward pass: an activation checkpoint would draw others than the
        forward pass did.
        """

        def refuse(name: str) -> None:
            raise ExecutionError(
                f"the model draws random numbers ({name}) in its backward pass, where it computes a "
                "checkpoint again: compare it without checkpoints, or without random numbers"
            )

        return before_draws(refuse)

    def _draws(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: RandomKey
    ) -> list[tuple[str, int | None]]:
        """Each draw of the graph, and the site that begins with it."""
        if self._graph is None:
            return []
        self._graph.train(self._model.training)
        model = dict(named_state(self._model))
        with torch.no_grad():
            for name, tensor in named_state(self._graph):
                if name in model:
                    tensor.copy_(model[name])
        draws: list[tuple[str, int | None]] = []
        begun: list[int] = []
        own_args, own_kwargs = tree_map(detached_leaf_copy, (args, dict(kwargs)))

        def note(name: str) -> None:
            draws.append((name, begun[-1] if begun else None))
            begun.clear()

        with keyed(key, entered=begun.append), before_draws(note):
            self._graph(*own_args, **own_kwargs)
        return draws


def _beside(model: nn.Module, graph: nn.Module) -> nn.Module:
    """A copy of the graph where the model is: by which operators a device draws is its own affair."""
    own = copy.deepcopy(graph)
    state, its = dict(named_state(model)), dict(named_state(own))
    shared = state.keys() & its.keys()  # a graph on a GPU has constants on the CPU
    devices, homes = {state[name].device for name in shared}, {its[name].device for name in shared}
    if devices == homes or len(devices) != 1:
        return own
    return relocated(own, next(iter(devices)), homes)
