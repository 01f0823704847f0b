"""Who is told of the steps of optimizers, and which weights they step."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.stages.optimizer_steps import (
    before_optimizers_step,
    optimizers_calling,
    stepped_by,
    steps_any_of,
)


def test_an_optimizer_steps_a_stage_where_any_of_its_groups_has_a_weight_of_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = pipeline(model, (torch.ones(1, 2),), split_spec={"1": SplitPoint.BEGINNING})
    first, second = (pipe.build_stage(index) for index in range(2))
    optimizer = torch.optim.SGD(
        [{"params": [model[0].weight]}, {"params": [nn.Parameter(torch.ones(2))]}], 0.1
    )
    assert [list(it.shape) for it in stepped_by(optimizer)] == [[2, 2], [2]]
    assert steps_any_of(optimizer, [first])
    assert steps_any_of(optimizer, [second, first])
    assert not steps_any_of(optimizer, [second])


def test_who_watches_a_compiled_step_is_not_compiled_with_it() -> None:
    class Watcher:
        compiled: bool | None = None

        def before_step(self, _: torch.optim.Optimizer) -> None:
            self.compiled = torch.compiler.is_compiling()

    watcher, weight = Watcher(), nn.Parameter(torch.ones(2))
    before_optimizers_step(watcher, Watcher.before_step)
    weight.grad = torch.ones(2)
    torch.compile(torch.optim.SGD([weight], lr=0.5).step, backend="eager")()
    assert watcher.compiled is False
    assert weight.tolist() == [0.5, 0.5]


def test_a_watcher_that_goes_while_others_are_told() -> None:
    """The user's step ended in "OrderedDict mutated during iteration"."""
    watchers, told_of = [nn.Identity() for _ in range(3)], []

    def lets_the_others_go(watcher: nn.Module, _: torch.optim.Optimizer) -> None:
        del watchers[1:]
        told_of.append(watcher)

    for watcher in watchers:
        before_optimizers_step(watcher, lets_the_others_go)
    del watcher
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.5).step()
    torch.optim.SGD([weight], lr=0.5).step()
    assert told_of.count(watchers[0]) == 2
    assert weight.tolist() == [0.0, 0.0]


def test_an_optimizer_that_steps_another_in_a_method_of_its_own_is_seen() -> None:
    class Wraps(torch.optim.SGD):
        def second(self) -> None:
            self.base.step()

    seen = []
    watcher, weight = nn.Identity(), nn.Parameter(torch.ones(2))
    before_optimizers_step(watcher, lambda _, stepped: seen.extend([stepped, *optimizers_calling()]))
    wraps = Wraps([weight], lr=0.5)
    wraps.base = torch.optim.SGD([weight], lr=0.5)
    wraps.base.step()
    assert seen[0] is wraps.base
    assert wraps not in seen
    wraps.second()
    assert wraps in seen


def test_what_a_caller_deletes_after_it_asked_is_let_go_of() -> None:
    """Before Python 3.13 a copy of a training loop's variables stayed in its frame: its last outputs too."""

    def loop(optimizer: torch.optim.Optimizer) -> bool:
        outputs = torch.ones(2)
        reference = weakref.ref(outputs)
        optimizers_calling()
        del outputs
        return reference() is None

    assert loop(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
