"""`verify` as a whole: what is equal, what it reports, and how it is called wrongly."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.verification.nets import Copy, WrongCopy, X, assert_only, make_net
from torch import nn

from partita.errors import ArgumentError, NotProven
from partita.verification import verify
from partita.verification.observing.observe import Mode


def test_a_module_equals_itself_and_says_what_was_compared() -> None:
    net = make_net()
    result = verify(net, net, (X.clone().requires_grad_(),)).check()
    assert result.ok
    assert result.raised is None
    assert result.compared["outputs"] == 2
    assert result.compared["gradients of parameters"] == 4
    assert result.compared["gradients of inputs"] == 1
    assert result.compared["buffers"] == 4


def test_a_deep_copy_equals_the_module() -> None:
    net = make_net()
    assert verify(copy.deepcopy(net), net, (X,)).ok


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: torch.compile(net, backend="eager"),
        lambda net: lambda x: net(x),
        lambda net: functools.partial(net),
        lambda net: net.forward,
        lambda net: nn.ModuleDict({"whole": net})["whole"],
    ],
    ids=["compiled", "closure", "partial", "method", "nested"],
)
def test_every_way_to_call_the_same_module_is_equal_to_it(wrap: Callable[[nn.Module], Any]) -> None:
    net = make_net()
    verify(wrap(net), net, (X,)).check()


@pytest.mark.parametrize("train", [True, False])
def test_it_works_without_parameters_and_gradients(train: bool) -> None:
    result = verify(torch.neg, torch.neg, (X,), backward=train).check()
    assert result.compared["gradients of parameters"] == 0


def test_train_is_the_old_name_of_backward() -> None:
    arguments = WrongCopy(), Copy(), (X.clone().requires_grad_(),)
    with pytest.warns(DeprecationWarning, match=r"verify\(train=False\) is now verify\(backward=False\)"):
        assert verify(*arguments, train=False).ok
    with (
        pytest.warns(DeprecationWarning, match="backward=True"),
        pytest.raises(ArgumentError, match="leave train out"),
    ):
        verify(*arguments, train=True, backward=False)  # there was a backward


def test_mode_is_that_of_copies_and_the_callers_stay() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    doubled = nn.Sequential(net[0], nn.Dropout(0.25))
    x = (torch.ones(2, 4),)
    assert not verify(doubled.train(), net, x, mode="train").ok
    assert verify(doubled, net, x, mode="eval").ok
    assert (net.training, doubled.training) == (False, True)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_modules_without_state_that_a_cut_model_lacks_are_no_difference_in_either_mode(mode: Mode) -> None:
    """The flag of an activation counted as changed by the run where ``mode`` had changed it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).train(mode != "train")
    graph = torch.fx.Graph()
    value = graph.placeholder("input")
    value = graph.call_module("2", (graph.call_function(torch.relu, (graph.call_module("0", (value,)),)),))
    graph.output(value)
    without = torch.fx.GraphModule({"0": net[0], "2": net[2]}, graph)
    verify(without, net, (X,), mode=mode).check()


def test_what_has_no_elements_is_not_said_to_be_equal_bit_for_bit() -> None:
    """Twice the outputs were "equal bit for bit" on the meta device."""
    with torch.device("meta"):
        net, x = nn.Linear(3, 2), torch.ones(1, 3)
    with pytest.warns(NotProven, match=r"no elements were compared of output, args\[0\], weight, bias: "):
        result = verify(lambda x: net(x) * 2, net, (x,))
    assert result.without_elements == ("output", "args[0]", "weight", "bias")
    assert str(result).startswith("equal, but no elements were compared of output, args[0], weight, bias: ")
    assert pickle.loads(pickle.dumps(result)) == result
    with torch.device("meta"):
        assert not verify(nn.Linear(3, 3), nn.Linear(3, 2), (x,)).ok
    assert verify(torch.abs, torch.abs, (X,)).without_elements == ()


def test_another_mode_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mode is 'training'; give 'train', 'eval', or None"):
        verify(torch.neg, torch.neg, (X,), mode="training")  # type: ignore[arg-type]


@pytest.mark.parametrize("same_numbers", [False, True])
def test_where_inductor_draws_other_numbers_a_hint_says_so(same_numbers: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return net(x) + torch.rand(())

    # As a function that torch.compile returns; Inductor itself takes half a minute.
    compiled.get_compiler_config = lambda: {"fallback_random": same_numbers}  # type: ignore[attr-defined]
    result = verify(compiled, net, (torch.ones(2, 4),))
    assert not result.ok
    assert ("Inductor draws others than eager mode does" in str(result)) is not same_numbers


def test_a_difference_without_random_numbers_has_no_hint() -> None:
    assert not verify(WrongCopy(), Copy(), (X.clone().requires_grad_(),)).hints


def test_backward_false_runs_no_backward() -> None:
    assert verify(WrongCopy(), Copy(), (X.clone().requires_grad_(),), backward=False).ok
    assert not verify(WrongCopy(), Copy(), (X.clone().requires_grad_(),)).ok


def test_keyword_arguments_reach_both() -> None:
    assert verify(torch.add, torch.add, (X, X), {"alpha": 2}).ok
    assert_only(
        verify(lambda a, *, scale: a * scale["by"], lambda a, *, scale: a * 3, (X,), {"scale": {"by": 2}}),
        "output",
        "output",
    )


@pytest.mark.parametrize("build", [make_net, lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2)))])
def test_a_backend_that_computes_something_else_is_reported(build: Callable[[], nn.Module]) -> None:
    # A compiled graph module hands out the plain one to deepcopy: that would have been verified instead.
    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *args: tuple(x * 2 if x.is_floating_point() else x for x in graph(*args))

    torch._dynamo.reset()
    net = build()
    assert not verify(torch.compile(net, backend=backend), net, (X,)).ok
    torch._dynamo.reset()


def test_the_same_call_gives_the_same_answer() -> None:
    net, other = make_net(), make_net()
    with torch.no_grad():
        other.inner.bias += 1
    first, second = (verify(other, net, (X,)) for _ in range(2))
    assert first == second
    assert str(first) == str(second)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"args": X},
            TypeError,
            r"args is a Tensor; give a tuple of the positional arguments, such as \(x,\)",
        ),
        ({"args": [X]}, TypeError, "args is a list"),
        ({"kwargs": [1]}, TypeError, "kwargs is a list; give a mapping"),
        ({"candidate": 3}, TypeError, "can't run a int: give a module, a split or a function"),
        ({"seed": -1}, ValueError, r"seed is -1; give an int in \[0, 2\*\*32\)"),
        ({"seed": 1.5}, TypeError, "seed is a float"),
        ({"rtol": -1.0}, ValueError, "rtol is -1.0; give a finite number that is at least 0"),
        ({"atol": float("inf")}, ValueError, "atol is inf"),
        ({"args": ((i for i in ()),)}, TypeError, "can't copy .*give modules, functions over modules"),
    ],
)
def test_bad_usage_is_explained(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"candidate": torch.neg, "reference": torch.neg, "args": (X,), **change}
    with pytest.raises(error, match=message):
        verify(**call)


def test_a_compiled_function_over_a_module_is_refused_with_the_next_step() -> None:
    net = nn.Linear(4, 2)
    compiled = torch.compile(lambda x: net(x), backend="eager")
    with pytest.raises(TypeError, match="compile the module instead"):
        verify(compiled, net, (X,))
