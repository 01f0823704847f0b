from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from partita._torch.compile.inductor import compile_with_inductor, draws_own_numbers


def test_a_graph_is_compiled_and_draws_the_numbers_of_its_operators() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.sin(), 0.5, True).cos()

    gm = make_fx(function, tracing_mode="fake")(torch.ones(64))
    code = gm.code
    run = compile_with_inductor(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])
    x = torch.randn(64)
    results = []
    for one in (run, function):
        torch.manual_seed(0)
        result = one(x)
        results.append(result[0] if isinstance(result, (tuple, list)) else result)
    torch.testing.assert_close(*results)
    assert gm.code == code


def test_writes_to_inputs_are_written() -> None:
    gm = make_fx(lambda x: x.add_(1), tracing_mode="fake")(torch.ones(4))
    x = torch.zeros(4)
    compile_with_inductor(gm, [gm.graph.find_nodes(op="placeholder")[0].meta["val"]])(x)
    assert x.tolist() == [1.0] * 4


def test_whether_inductor_draws_numbers_of_its_own_is_told_by_its_settings() -> None:
    assert draws_own_numbers({})
    assert not draws_own_numbers({"fallback_random": True})
    with torch._inductor.config.patch(fallback_random=True):
        assert not draws_own_numbers({})
        assert draws_own_numbers({"fallback_random": False})
