from __future__ import annotations

import functools
import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import partita
from partita.verification.observing.copying import Copies, copy_for_run, copy_module
from partita.verification.observing.subject import subject_of


class Affine(nn.Module):
    """dynamo does not compile torch's own modules in place, but does compile this one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


GLOBAL_NET = nn.Linear(2, 2)


def _helper(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL_NET(x)  # type: ignore[no-any-return]


def copied(value: Any, *args: Any) -> Copies:
    return copy_for_run(subject_of(value), args, {})


def test_parameters_keep_gradients_ties_and_shared_storage() -> None:
    flat = torch.arange(6.0)
    net = nn.Module()
    net.a, net.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    net.c = net.a
    net.a.grad = torch.ones(4)
    new = copied(lambda: net).subject.roots[0][1]
    assert isinstance(new, nn.Module)
    assert new.a is new.c
    assert new.a is not net.a
    assert torch.equal(new.a.grad, net.a.grad)
    assert new.a.grad is not net.a.grad
    assert new.a.untyped_storage().data_ptr() == new.b.untyped_storage().data_ptr() != flat.data_ptr()


def test_an_argument_that_is_a_parameter_stays_one_object() -> None:
    net = nn.Linear(2, 2)
    copies = copied(net, net.weight)
    assert copies.args[0] is copies.subject.call.weight  # type: ignore[attr-defined]


def test_functions_are_rebuilt_over_copies_of_closures_defaults_and_globals() -> None:
    net, log = nn.Linear(2, 2), list[int]()

    def recursive(x: torch.Tensor, depth: int = 1, own: nn.Module = net) -> torch.Tensor:
        log.append(depth)
        with torch.no_grad():
            own.weight += 1
            net.bias += 1
            GLOBAL_NET.bias += 1
        return recursive(x, depth - 1) if depth else _helper(net(x))

    before = [t.clone() for t in (net.weight, net.bias, GLOBAL_NET.bias)]
    copies = copied(functools.partial(recursive, depth=2), torch.zeros(1, 2))
    copies.subject.call(*copies.args)
    assert log == []
    assert all(
        torch.equal(a, b) for a, b in zip(before, (net.weight, net.bias, GLOBAL_NET.bias), strict=True)
    )
    assert len(copies.subject.roots) == 2


def test_a_tensor_with_a_history_becomes_a_writable_one_over_a_leaf() -> None:
    source = torch.ones(3, requires_grad=True)
    copies = copied(torch.neg, source * 2)
    copies.args[0].mul_(3).sum().backward()
    ((path, leaf),) = copies.leaves
    assert path == "args[0]"
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]
    assert source.grad is None


def test_views_among_the_arguments_stay_views() -> None:
    base = torch.zeros(4)
    whole, part = copied(torch.neg, base, base[2:]).args
    part += 1
    assert whole.tolist() == [0, 0, 1, 1]
    assert base.tolist() == [0, 0, 0, 0]


def test_hooks_and_unused_state_of_a_graph_module_are_copied() -> None:
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    net.spare = nn.Linear(1, 1)
    net.calls = 3
    net.register_forward_hook(lambda module, args, output: output + 1)
    new = copied(net).subject.call
    assert isinstance(new, nn.Module)
    assert len(new._forward_hooks) == 1
    assert new.calls == 3
    assert new.spare is not net.spare
    assert torch.equal(new(torch.zeros(1, 2)), net(torch.zeros(1, 2)))


def test_many_copies_do_not_confuse_objects_that_are_gone() -> None:
    # The memo goes by id: a temporary that was freed once lent its id, and its copy, to another object.
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for _ in range(50):
        copies = copy_for_run(
            subject_of(functools.partial(net)), ([torch.zeros(2)], (1, "a")), {"k": {"v": net}}
        )
        assert isinstance(copies.args[0][0], torch.Tensor)
        assert isinstance(copies.kwargs["k"]["v"], nn.Sequential)


@pytest.mark.parametrize("build", [lambda: Affine(), lambda: torch.fx.symbolic_trace(nn.Linear(2, 2))])
@pytest.mark.parametrize("way", ["whole", "in place", "part"])
def test_what_is_compiled_stays_compiled_in_the_copy(build: Any, way: str) -> None:
    # deepcopy of a compiled graph module gives the plain graph module: a wrong backend would have passed.
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    net = build()
    if way == "in place":
        net.compile(backend=backend)
    else:
        net = torch.compile(net, backend=backend)
    whole = nn.Sequential(net) if way == "part" else net
    copies = copied(whole, torch.zeros(1, 2))
    names = [name for name, _ in whole.named_parameters()]
    new = copies.subject.call
    assert isinstance(new, nn.Module)
    assert sorted(name for name, _ in new.named_parameters()) == sorted(names)
    new(*copies.args)
    assert len(graphs) == 1
    torch._dynamo.reset()


class Pickled(nn.Module):
    """Keeps the text that it was made from and is made from it again, as einops' layers are."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern, self.calls = pattern, 0

    def __getstate__(self) -> dict[str, Any]:
        return {"pattern": self.pattern}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def test_a_layer_that_is_made_anew_by_copying_has_its_flag_attributes_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Pickled("a b -> b a")).eval()
    model[1].calls = 3
    model[1].register_forward_hook(print)
    copied: Any = copy_for_run(subject_of(model), (), {}).subject.call
    assert copied[1] is not model[1]
    assert (copied[1].training, copied[1].calls, copied[1].pattern) == (False, 3, "a b -> b a")
    assert list(copied[1]._forward_hooks.values()) == [print]


@torch.jit.script
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class HoldsWhatIsShared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.lock = threading.Lock()
        self.tables = {"function": _doubled, "module": math}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.tables["function"](self.linear(x)) * self.tables["module"].pi


def test_what_holds_no_tensors_and_has_no_copy_is_shared() -> None:
    model = HoldsWhatIsShared()
    twin = copy_module(model)
    assert twin.linear.weight is not model.linear.weight
    assert twin.lock is model.lock
    assert twin.tables == model.tables
    partita.verify(model, model, (torch.ones(2, 2),)).check()


def test_functions_among_the_attributes_hold_the_copy() -> None:
    """They ran with the original's weights and left gradients there."""
    net, other = Affine(), nn.Linear(2, 2)
    net.call, net.other = lambda x: net.inner(x), lambda: other
    twin = copy_module(net)
    twin.call(torch.ones(1, 2)).sum().backward()
    assert net.inner.weight.grad is None
    assert twin.inner.weight.grad is not None
    assert twin.other() is other
