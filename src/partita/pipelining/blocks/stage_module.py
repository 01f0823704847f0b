"""The module of a stage that runs the model's own code: the model's structure with one stage's state."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.modules.calls import calls_watched, overridden_calls
from partita._torch.modules.contents import named_tables, state_tables
from partita.pipelining.blocks.cut import BlockCut
from partita.pipelining.blocks.memos import nothing_remembered
from partita.pipelining.blocks.packet import Packet
from partita.pipelining.blocks.run import Run, Stop, current_run
from partita.runtime.rng import active_seed, enter_site

__all__ = ["StageModule", "entering", "generator_states", "keyed_generators", "leaving", "set_generators"]

_HOST_SITE = 2**62
"""Of the generators that are not torch's, among the call sites of random numbers."""


class StageModule(nn.Module):
    """Takes and returns a `Packet`; the last one returns what the model returns.

    Its parameters and buffers are those of the stage, under the model's own names. The others are there while
    it runs only, without memory.

    Args:
        root: a copy of the model.
        stage: which stage it is.
        cut: of the model.
        device: where the stage runs, if it has no parameters and buffers that say so.
        ghosts: stand in the copy for the parameters and buffers of other stages.
    """

    def __init__(
        self, root: nn.Module, stage: int, cut: BlockCut, device: torch.device, ghosts: Iterable[Tensor]
    ) -> None:
        super().__init__()
        for name in state_tables:  # one and the same: who changes this module's state changes the root's
            vars(self)[name] = vars(root)[name]
        vars(self)["root"] = root  # not as a child: names stay the model's
        self.stage = stage
        self.cut = cut
        self.device = device
        self.training = root.training
        self._tables: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
        self._own_calls = overridden_calls(root)
        foreign = {id(ghost) for ghost in ghosts}
        for module in root.modules():
            for table in named_tables(module):
                others = {name: tensor for name, tensor in table.items() if id(tensor) in foreign}
                if others:
                    self._tables.append((table, others))
        self._hide()

    @property
    def home(self) -> torch.device:
        """Where the stage runs."""
        tensors = chain(self.parameters(), self.buffers())
        return next((tensor.device for tensor in tensors), self.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, packet: Packet) -> Any:
        """Run the stage's part of the model.

        Raises:
            ExecutionError: the model uses what no stage has handed on, or goes another way than on the stages
                before.
        """
        root: nn.Module = vars(self)["root"]
        root.training = self.training
        home = self.home
        self._show()
        try:
            run = Run(
                self.stage,
                self.cut,
                packet,
                training=self.training,
                home=home,
                state=self._state(root),
            )
            with calls_watched(self._own_calls), nothing_remembered(), _generators(packet), run:
                enter_site(self.stage)
                args, kwargs = run.arguments()
                try:
                    result = root(*args, **kwargs)
                    run.finish(result)
                except Stop:
                    result = run.made
            return result
        finally:
            self._hide()

    def _show(self) -> None:
        """Put the other stages' parameters where the model looks for them."""
        for table, ghosts in self._tables:
            table.update(ghosts)

    def _hide(self) -> None:
        """Take them out again: a parameter that is None is none, and keeps its place among the others."""
        for table, ghosts in self._tables:
            table.update(dict.fromkeys(ghosts))

    def _state(self, root: nn.Module) -> dict[int, str]:
        """The names of all parameters, buffers and tensors that are attributes, by identity."""
        names: dict[int, str] = {}
        for path, module in root.named_modules():
            for table in (*named_tables(module), vars(module)):
                for name, value in table.items():
                    if isinstance(value, Tensor):
                        names[id(value)] = f"{path}.{name}" if path else name
        return names


def entering(path: str, arguments: Any) -> None:
    """A module of a stage is about to be called."""
    run = current_run()
    if run is not None:
        run.enter(path, arguments)


def leaving(path: str) -> None:
    """A module of a stage has returned."""
    run = current_run()
    if run is not None:
        run.leave(path)


def generator_states() -> tuple[Any, Any]:
    """Where Python's and numpy's global generators stand."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_generators(states: tuple[Any, Any]) -> None:
    """Put them there."""
    numpy = sys.modules.get("numpy")
    random.setstate(states[0])
    if numpy is not None and states[1] is not None:
        numpy.random.set_state(states[1])


@contextmanager
def keyed_generators() -> Iterator[None]:
    """Within it Python's and numpy's generators follow the active `RandomKey`, where there is one."""
    seed = active_seed(_HOST_SITE)
    if seed is None:
        yield
        return
    before = generator_states()
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        set_generators(before)


@contextmanager
def _generators(packet: Packet) -> Iterator[None]:
    """Let Python's and numpy's generators stand where they stood on the first stage."""
    if packet.generators is not None:
        set_generators(packet.generators)
        yield
        return
    with keyed_generators():
        yield
