"""A stage's share of a tied parameter's gradient, apart from what is in ``.grad`` already.

The first stage that holds the parameter owns the sum: the shares travel to it from holder to holder, and only
there are they added to ``.grad``, and hooks run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from partita._torch.autograd.engine import hooks_paused
from partita.errors import SignatureMismatch
from partita.pipelining.interface.routes import Routes, Tied

__all__ = ["TiedShare", "TiedShares", "kept_apart"]


class TiedShare:
    """One stage's share in one tied parameter.

    Attributes:
        name: of the gradient, as it travels.
        parameter: this stage's copy.
        owned: whether the sum is taken here.
    """

    def __init__(self, group: Tied, parameter: nn.Parameter, stage: int) -> None:
        self.name = group.value.name
        self.parameter = parameter
        self.owned = group.stages[0] == stage


class TiedShares:
    """One stage's shares in all tied parameters that it holds.

    Attributes:
        are_of_others: whether another stage owns the gradient of one of them.
    """

    def __init__(self, module: nn.Module, stage: int, routes: Routes) -> None:
        self._stage = stage
        self._names = {
            group: next(name for name in group.names if _has_parameter(module, name))
            for group in routes.tied
            if stage in group.stages
        }
        self._travelling = [group for group in self._names if group.value.requires_grad and group.chained]
        self.are_of_others = any(group.stages[0] != stage for group in self._travelling)

    @property
    def names(self) -> list[str]:
        """What the stage calls the parameters whose gradients travel."""
        return [self._names[group] for group in self._travelling]

    def owned_by_others(self, module: nn.Module) -> list[nn.Parameter]:
        """The stage's copies of those whose gradient another stage owns: they are due with its inputs'."""
        return [self.parameter(one, module) for one in self._travelling if one.stages[0] != self._stage]

    def parameter(self, group: Tied, module: nn.Module) -> nn.Parameter:
        """The stage's copy of a tied parameter, in ``module``."""
        return module.get_parameter(self._names[group])

    def of_microbatch(
        self, module: nn.Module, gradients: Mapping[str, Tensor], roots: list[Tensor], seeds: list[Tensor]
    ) -> list[TiedShare]:
        """The shares whose gradients travel. What later stages sent of them is added to the roots of the
        backward pass.
        """
        shares = [TiedShare(group, self.parameter(group, module), self._stage) for group in self._travelling]
        for share in shares:
            if share.name in gradients:
                roots.append(share.parameter)
                seeds.append(gradients[share.name])
        return shares

    def check_are_as_cut(self, module: nn.Module) -> None:
        """Refuse a tied parameter that was frozen, or is trained, since the cut: its stages would disagree.

        Raises:
            SignatureMismatch: there is one.
        """
        for group in self._names:
            if self.parameter(group, module).requires_grad != group.value.requires_grad:
                was = "trained" if group.value.requires_grad else "frozen"
                raise SignatureMismatch(
                    f"the tied parameter {group.names[0]!r} was {was} when the pipeline was cut, and is not "
                    "now: cut it again"
                )


def _has_parameter(module: nn.Module, name: str) -> bool:
    try:
        module.get_parameter(name)
    except AttributeError:
        return False
    return True


@contextmanager
def kept_apart(shares: Sequence[TiedShare], *, replicated: bool) -> Iterator[dict[str, Tensor | None]]:
    """Run a backward pass that neither changes ``.grad`` of parameters that another stage owns nor runs their
    hooks. When the block ends, the dict has their shares by name.

    Args:
        replicated: the stage is in ``DistributedDataParallel``, which may replace a ``.grad`` by the mean
            over the replicas; the owner needs this replica's share.
    """
    others = [share for share in shares if not share.owned]
    gradients: dict[str, Tensor | None] = {}
    with hooks_paused([share.parameter for share in others]):
        before = [share.parameter.grad for share in others]
        for share in others:
            share.parameter.grad = None
        watches = [
            share.parameter.register_hook(partial(gradients.__setitem__, share.name))
            for share in others
            if replicated
        ]
        try:
            yield gradients
        finally:
            for watch in watches:
                watch.remove()
            for share, gradient in zip(others, before, strict=True):
                gradients.setdefault(share.name, None if replicated else share.parameter.grad)
                share.parameter.grad = gradient
