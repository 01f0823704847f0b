"""The functions that switch regions, and autocast's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from partita._torch import regions
from partita._torch.regions import EMPTY_CACHE, ENTER_CACHE_SCOPE, LEAVE_CACHE_SCOPE, is_barrier_function


class _Weight:
    """A weight, and whether autocast converts it anew."""

    def __init__(self) -> None:
        self.weight = torch.ones(2, 2, requires_grad=True)

    def converted(self) -> torch.Tensor:
        """The copy that autocast hands to a matmul, seen in the graph of its gradient."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = torch.matmul(torch.ones(2, 2), self.weight)
        inputs = [function for function, _ in product.grad_fn.next_functions if function is not None]  # type: ignore[union-attr]
        return inputs[0]  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _balanced() -> Iterator[None]:
    yield
    assert regions._SCOPES.open == 0
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


def test_a_scope_keeps_converted_weights_between_regions() -> None:
    weight = _Weight()
    assert weight.converted() is not weight.converted()
    scope = ENTER_CACHE_SCOPE()
    assert weight.converted() is weight.converted()
    LEAVE_CACHE_SCOPE(scope)


def test_a_scope_that_an_exception_skips_is_closed_with_its_frame() -> None:
    def fails() -> None:
        scope = ENTER_CACHE_SCOPE()
        torch.ones(2).reshape(3)
        LEAVE_CACHE_SCOPE(scope)

    with pytest.raises(RuntimeError, match="invalid for input"):
        fails()  # the fixture checks what is left behind


def test_emptying_forgets_what_only_our_scopes_keep() -> None:
    weight = _Weight()
    scope = ENTER_CACHE_SCOPE()
    before = weight.converted()
    EMPTY_CACHE()
    assert weight.converted() is not before
    LEAVE_CACHE_SCOPE(scope)


def test_emptying_leaves_the_callers_cache_alone() -> None:
    weight = _Weight()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = weight.converted()
        scope = ENTER_CACHE_SCOPE()
        EMPTY_CACHE()
        assert weight.converted() is before
        LEAVE_CACHE_SCOPE(scope)
        assert weight.converted() is before


@pytest.mark.parametrize(
    "function",
    [
        torch.set_default_dtype,
        torch.use_deterministic_algorithms,
        torch.autocast_increment_nesting,
        torch._C._functorch._vmap_increment_nesting,
        torch._C._autograd._saved_tensors_hooks_enable,
        torch.nn.attention._sdpa_kernel,
    ],
)
def test_setters_of_global_state_are_barriers(function: object) -> None:
    assert is_barrier_function(function)


@pytest.mark.parametrize("function", [torch.sin, torch.is_grad_enabled, print, torch.get_default_dtype])
def test_other_functions_are_not(function: object) -> None:
    assert not is_barrier_function(function)
