"""What a rank tells the others at the beginning of a backward pass, and when there is something to tell.

In the first two passes ranks always exchange what they expect; afterwards only where some rank has compiled
something new, which a flag in the last bucket of the pass before has told to all. A sample of the weights,
behind that flag, shows whether the replicas have drifted apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from partita.ddp.reducing.agreement import GraphFingerprint, Proposal, agree
from partita.runtime import Comm
from partita.runtime.weight_sample import SAMPLE_FLAGS, samples_differ

__all__ = ["Consensus"]

_LOG = logging.getLogger("partita.ddp")
_LEARNING_STEPS = 2


class Consensus:
    """What all ranks have agreed on.

    Args:
        count: how many parameters there are.
        check_graphs: raise where ranks have compiled different graphs; otherwise the log says so, once for
            each difference.

    Attributes:
        step: how many synchronised passes have ended.
        order: in which gradients are expected to get ready, by parameter index; the same on all ranks.
        times_written: how often this rank's parameters have been written to since all were equal.
        check_weights: is called in the first pass, on all ranks, where they differ in that.
        warn_of_drift: is called with `step`, on all ranks, where samples of the weights differ; returns
            whether the weights do.
    """

    def __init__(self, comm: Comm, count: int, *, check_graphs: bool) -> None:
        self.step = 0
        self.times_written: Callable[[], int] = int
        self.check_weights: Callable[[], None] | None = None
        self.warn_of_drift: Callable[[int], bool] | None = None
        self.order = tuple(reversed(range(count)))
        self._comm = comm
        self._check_graphs = check_graphs
        self._graphs: dict[GraphFingerprint, None] = {}
        self._announced: set[GraphFingerprint] = set()
        self._logged = {""}
        self._flags: torch.Tensor | None = None
        self._compares_from = 0
        self._observed: dict[int, None] = {}

    def add_graph(self, graph: GraphFingerprint) -> None:
        """Note that this rank has compiled a backward graph."""
        self._graphs[graph] = None

    def observe(self, index: int) -> None:
        """Note that the gradient of a parameter is there: its place in the order is the next one."""
        self._observed.setdefault(index)

    @property
    def has_news(self) -> bool:
        """Whether this rank has compiled what the others do not know of."""
        return not self._graphs.keys() <= self._announced

    def exchange(self, expected: Sequence[int]) -> bool:
        """Agree with all ranks, where there is something new on any of them. Collective.

        Args:
            expected: in which order this rank expects the first gradients, by parameter index.

        Returns:
            Whether `order` has changed.

        Raises:
            SignatureMismatch: ranks are in different steps, have compiled different graphs, or have other
                weights in the first pass.
        """
        flags = [] if self._flags is None else self._flags.tolist()
        if flags and samples_differ(flags[-SAMPLE_FLAGS:]):
            self._compare()
        news = bool(flags and flags[0])
        if self.step >= _LEARNING_STEPS and not news:
            return False
        if self.step == 1:
            expected = tuple(self._observed)
        order = dict.fromkeys((*expected, *self.order))
        written = 0 if self.step else self.times_written()
        proposal = Proposal(self.step, tuple(order), tuple(self._graphs), written)
        agreed, difference = agree(
            self._comm, proposal, check_graphs=self._check_graphs, check_weights=self.check_weights
        )
        if difference not in self._logged:
            self._logged.add(difference)
            _LOG.warning("%s\nThe gradients are reduced rightly all the same", difference)
        self._announced = set(self._graphs)
        if self.step >= _LEARNING_STEPS or agreed.order == self.order:
            return False
        self.order = agreed.order
        return True

    def _compare(self) -> None:
        """Compare all weights: once, where they do differ; ever less often, where it is not seen in them."""
        if self.warn_of_drift is None or self.step < self._compares_from:
            return
        self._compares_from = 2 * self.step
        warn, self.warn_of_drift = self.warn_of_drift, None  # once, also where a warning is an error
        if not warn(self.step):
            self.warn_of_drift = warn

    def pass_ends(self, flags: torch.Tensor) -> None:
        """Note that a synchronised pass is over.

        Args:
            flags: see `Reduction.flagged`; the first is not zero where any rank has news.
        """
        self._flags = flags
        self.step += 1
