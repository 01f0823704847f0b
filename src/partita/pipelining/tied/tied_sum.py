"""Sums of the gradients of tied parameters, once a step: cheaper than sending them with each microbatch.

::

    exact     each microbatch   a gradient of the parameter's size travels from the last stage to the first
    reduced   each step         one all-reduce of that size over the ranks with a copy

The sum is added up in another order, so it equals the uncut model's gradient to about 1e-6 of it and not bit
for bit. It is the better choice for large vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partita._torch.tensors.parameters import has_hooks
from partita.errors import ExecutionError
from partita.pipelining.interface.routes import Routes, Tied
from partita.pipelining.stages.stage import Stage
from partita.pipelining.tied.equal_copies import local_tensor, other_values, sample_of
from partita.runtime import Comm, wait_all
from partita.runtime.weight_sample import samples_differ

__all__ = ["TiedSums", "with_chains"]


def with_chains(routes: Routes, chained: bool) -> Routes:
    """Return the same routes with gradients of tied parameters that travel with each microbatch, or don't."""
    if all(group.chained == chained for group in routes.tied):
        return routes
    names = {group.value.name for group in routes.tied}
    backward = {
        pair: tuple(name for name in sent if name not in names) for pair, sent in routes.backward.items()
    }
    if chained:
        for group in routes.tied:
            for earlier, later in pairwise(group.stages) if group.value.requires_grad else ():
                backward[later, earlier] = (*backward.get((later, earlier), ()), group.value.name)
    return replace(
        routes,
        backward={pair: sent for pair, sent in sorted(backward.items()) if sent},
        tied=tuple(replace(group, chained=chained) for group in routes.tied),
        evaluation=None if routes.evaluation is None else with_chains(routes.evaluation, chained),
        _by_sizes={},
    )


class TiedSums:
    """The sums of one rank in one step: `begin`, the step, `end`.

    Gradients of earlier steps are sums over all ranks already, so they are put aside during the step.
    """

    def __init__(self, comm: Comm, stages: Mapping[int, Stage], stage_ranks: Sequence[int]) -> None:
        self._comm = comm
        self._stages = stages
        self._stage_ranks = stage_ranks
        self._gradients: list[_TiedGradient] = []

    def begin(self, groups: Sequence[Tied]) -> None:
        """Put aside the gradients of earlier steps.

        Raises:
            ExecutionError: such a parameter has hooks, which would see shares and not gradients.
        """
        for group in groups:
            parameters = self._copies(group)
            if not group.value.requires_grad or not parameters:
                continue
            if group.chained:
                _check_whole(group, parameters)
                continue
            if any(has_hooks(parameter) for parameter in parameters):
                raise ExecutionError(
                    f"the tied parameter {group.names[0]!r} has hooks, which would see the shares of its "
                    'stages one by one and not its gradient: make the schedule with tied_gradients="exact"'
                )
            ranks = tuple(sorted({self._stage_ranks[stage] for stage in group.stages}))
            self._gradients.append(
                _TiedGradient(group, ranks, parameters, [parameter.grad for parameter in parameters])
            )
            for parameter in parameters:
                parameter.grad = None

    def end(self, step: int) -> None:
        """Sum the shares of all ranks, and add what was put aside. Collective.

        Raises:
            ExecutionError: a share is sparse, or the copies are not equal any more.
        """
        for gradient in self._gradients:
            gradient.check_dense()
        totals = [(gradient, gradient.share(), gradient.counts(step)) for gradient in self._gradients]
        handles = []
        for gradient, share, counts in totals:
            if len(gradient.ranks) > 1:
                handles += [
                    self._comm.all_reduce(tensor, gradient.ranks) for tensor in (counts, local_tensor(share))
                ]
        wait_all(handles)
        for gradient, share, counts in totals:
            count, *sample = counts.tolist()
            if samples_differ(sample):
                raise other_values(gradient.group)
            gradient.write_sum(share if count else None)
        self._gradients.clear()

    def _copies(self, group: Tied) -> list[nn.Parameter]:
        """The copies on this rank, each object once."""
        copies = [self._stages[stage].parameter(group) for stage in group.stages if stage in self._stages]
        return list({id(parameter): parameter for parameter in copies}.values())


@dataclass(frozen=True)
class _TiedGradient:
    """A tied parameter's gradient in one step.

    Attributes:
        ranks: the ranks that have copies.
        copies: the copies on this rank.
        before: the gradients that the copies had before the step.
    """

    group: Tied
    ranks: tuple[int, ...]
    copies: Sequence[nn.Parameter]
    before: Sequence[Tensor | None]

    def check_dense(self) -> None:
        """Refuse sparse shares: they would be added up on this rank only."""
        if any(copy.grad is not None and copy.grad.is_sparse for copy in self.copies):
            raise ExecutionError(
                f"the tied parameter {self.group.names[0]!r} has a sparse gradient, and stages exchange "
                "dense ones: build its embedding with sparse=False, or cut so that one stage has it"
            )

    def counts(self, step: int) -> Tensor:
        """The number of copies on this rank that have a share, and their samples."""
        count = torch.tensor([sum(copy.grad is not None for copy in self.copies)], device="cpu")
        samples = [sample_of(copy, step).cpu() for copy in self.copies]
        return torch.cat((count, torch.stack(samples).sum(0)))

    @torch.no_grad()
    def share(self) -> Tensor:
        """The sum on this rank, in the first copy's own gradient where it has one."""
        first, *others = self.copies
        total = first.grad if first.grad is not None else torch.zeros_like(first, requires_grad=False)
        for other in others:
            if other.grad is not None:
                total += other.grad
        return total

    @torch.no_grad()
    def write_sum(self, total: Tensor | None) -> None:
        """Give every copy the sum over all steps; None: no rank has a share in this step."""
        for number, (copy, before) in enumerate(zip(self.copies, self.before, strict=True)):
            if total is None:
                copy.grad = before
                continue
            if copy.grad is None:
                copy.grad = total if number == 0 else total.clone()
            elif number:
                copy.grad.copy_(total)
        for copy, before in zip(self.copies, self.before, strict=True):
            if total is not None and before is not None:
                assert copy.grad is not None
                copy.grad += before


def _check_whole(group: Tied, parameters: Sequence[nn.Parameter]) -> None:
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ExecutionError(
            f"the tied parameter {group.names[0]!r} is sharded, so its gradient can't travel with each "
            'microbatch: make the schedule with tied_gradients="reduced"'
        )
