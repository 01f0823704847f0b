from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from partita._torch.modules.compiled import (
    compile_in_place_like,
    compiled_like,
    draws_other_numbers,
    inside_compiled,
    is_compiled,
)


class Affine(nn.Module):
    """dynamo does not compile torch's own modules in place, but does compile this one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


@pytest.fixture
def compilations() -> Iterator[list[torch.fx.GraphModule]]:
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def recording(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


def test_another_module_is_compiled_with_the_same_backend(compilations: list[torch.fx.GraphModule]) -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 3)
    compiled = torch.compile(net, backend=recording(compilations))
    assert inside_compiled(compiled) is net
    assert inside_compiled(net) is None
    assert is_compiled(compiled)
    assert not is_compiled(net)
    new = compiled_like(compiled, other)
    assert inside_compiled(new) is other
    assert new(torch.zeros(1, 2)).shape == (1, 3)
    assert len(compilations) == 1


def test_a_module_compiled_in_place_is_imitated(compilations: list[torch.fx.GraphModule]) -> None:
    net, other, uncompiled = Affine(2), Affine(3), Affine(4)
    net.compile(backend=recording(compilations))
    assert is_compiled(net)
    assert not is_compiled(other)
    compile_in_place_like(net, other)
    compile_in_place_like(uncompiled, uncompiled)
    uncompiled(torch.zeros(1, 2))
    assert compilations == []
    other(torch.zeros(1, 2))
    assert len(compilations) == 1


def test_a_module_that_was_not_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a Linear is not what torch\.compile returns"):
        compiled_like(nn.Linear(1, 1), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, True), ({"options": {"fallback_random": True}}, False), ({"backend": "eager"}, False)],
)
def test_inductor_draws_other_numbers_unless_it_is_told_not_to(
    options: dict[str, Any], expected: bool
) -> None:
    """Nothing is compiled: it is not called."""
    in_place = nn.Linear(2, 2)
    in_place.compile(**options)
    for value in (
        torch.compile(nn.Linear(2, 2), **options),
        torch.compile(torch.sin, **options),
        nn.Sequential(torch.compile(nn.Linear(2, 2), **options)),
        in_place,
    ):
        assert draws_other_numbers(value) is expected
    assert not draws_other_numbers(nn.Linear(2, 2))
