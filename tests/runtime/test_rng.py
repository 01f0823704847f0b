from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace

from partita.runtime import Comm, InProcessWorld, RandomKey, enter_site, key_random_nodes, keyed, site_seed


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(x, 0.5)
        torch.rand_like(x)  # its result is unused: dead code to fx, but a draw all the same
        return nn.functional.dropout(y + 1, 0.5)


def _is_random(node: Node) -> bool:
    return node.target in {nn.functional.dropout, torch.rand_like}


@pytest.fixture
def keyed_module() -> GraphModule:
    module = symbolic_trace(Noisy())
    assert key_random_nodes(module, _is_random) == 3
    return module


def _draws(key: RandomKey, site: int, count: int = 1000) -> torch.Tensor:
    with keyed(key):
        enter_site(site)
        return torch.rand(count)


def test_equal_keys_give_equal_bits_and_every_part_of_the_key_counts() -> None:
    base = _draws(RandomKey(0, 1, 2), 3)
    assert torch.equal(base, _draws(RandomKey(0, 1, 2), 3))
    others = [
        _draws(RandomKey(1, 1, 2), 3),
        _draws(RandomKey(0, 2, 2), 3),
        _draws(RandomKey(0, 1, 3), 3),
        _draws(RandomKey(0, 1, 2), 4),
        _draws(RandomKey(0, 2, 1), 3),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1].item()
        assert abs(correlation) < 0.15  # 1000 independent pairs: 0.15 is beyond 4 standard deviations


def test_first_draws_over_neighbouring_keys_are_uniform() -> None:
    first = torch.cat(
        [
            _draws(RandomKey(0, step, mb), site, 1)
            for step in range(10)
            for mb in range(10)
            for site in range(10)
        ]
    )
    assert abs(first.mean().item() - 0.5) < 0.04  # 4 standard deviations of the mean of 1000 uniform numbers
    assert all(70 <= count <= 130 for count in torch.histc(first, 10, 0, 1).tolist())


@given(st.tuples(*[st.integers(0, 2**40)] * 4), st.tuples(*[st.integers(0, 2**40)] * 4))
def test_seeds_are_64_bits_and_differ_where_keys_differ(
    left: tuple[int, int, int, int], right: tuple[int, int, int, int]
) -> None:
    seeds = [site_seed(RandomKey(*numbers[:3]), numbers[3]) for numbers in (left, right)]
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert (seeds[0] == seeds[1]) == (left == right)


def test_without_a_key_the_graph_draws_as_the_model_does(keyed_module: GraphModule) -> None:
    x = torch.ones(64)
    torch.manual_seed(5)
    expected, after = Noisy()(x), torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(keyed_module(x), expected)
    assert torch.equal(torch.rand(4), after)


def test_a_block_leaves_the_generator_as_it_found_it_also_when_it_raises(keyed_module: GraphModule) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with keyed(RandomKey(0, 0, 0)), keyed(RandomKey(0, 0, 1)):
        keyed_module(torch.ones(8))
    with pytest.raises(RuntimeError, match="shape"), keyed(RandomKey(0, 0, 0)):
        keyed_module(torch.ones(8)).reshape(3)
    assert torch.equal(torch.rand(4), expected)


def test_overlapping_blocks_of_several_ranks_draw_what_each_would_alone(keyed_module: GraphModule) -> None:
    def rank_draws(comm: Comm) -> list[torch.Tensor]:
        results = []
        with keyed(RandomKey(7, 0, comm.rank)):
            for _ in range(3):
                results.append(keyed_module(torch.ones(32)))
                comm.barrier()
        return results

    def alone(rank: int) -> torch.Tensor:
        with keyed(RandomKey(7, 0, rank)):
            return keyed_module(torch.ones(32))

    torch.manual_seed(5)
    expected_after = torch.rand(4)
    torch.manual_seed(5)
    draws = InProcessWorld(3).run(rank_draws)
    assert torch.equal(torch.rand(4), expected_after)
    for rank, results in enumerate(draws):
        assert all(torch.equal(result, alone(rank)) for result in results)


def test_each_random_node_follows_its_site_and_keying_twice_adds_nothing(keyed_module: GraphModule) -> None:
    nodes = list(keyed_module.graph.nodes)
    sites = [(node.prev.target, node.prev.args) for node in nodes if _is_random(node)]
    assert sites == [(enter_site, (0,)), (enter_site, (1,)), (enter_site, (2,))]
    assert key_random_nodes(keyed_module, _is_random) == 0
    assert len(keyed_module.graph.nodes) == len(nodes)


def test_dead_code_elimination_keeps_the_sites_and_so_does_a_deep_copy(keyed_module: GraphModule) -> None:
    keyed_module.graph.eliminate_dead_code()
    keyed_module.recompile()
    assert sum(node.target is enter_site for node in keyed_module.graph.nodes) == 3
    copied = copy.deepcopy(keyed_module)
    with keyed(RandomKey(1, 2, 3)):
        expected = keyed_module(torch.ones(16))
    with keyed(RandomKey(1, 2, 3)):
        assert torch.equal(copied(torch.ones(16)), expected)


def test_steps_and_microbatches_count_from_zero() -> None:
    with pytest.raises(ValueError, match=r"step \(-1\) and microbatch \(0\) count from 0"):
        RandomKey(0, -1, 0)


# --- compiled ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_has_no_breaks_and_draws_the_same_bits(
    keyed_module: GraphModule, backend: str
) -> None:
    compiled = torch.compile(copy.deepcopy(keyed_module), backend=backend, fullgraph=True)
    x = torch.ones(100, requires_grad=True)
    for microbatch in range(2):
        with keyed(RandomKey(0, 0, microbatch)):
            expected = keyed_module(x)
        with keyed(RandomKey(0, 0, microbatch)):
            assert torch.equal(compiled(x), expected)


def test_inductors_own_numbers_depend_on_the_key_alone(keyed_module: GraphModule) -> None:
    compiled = torch.compile(keyed_module, fullgraph=True)
    drawn = []
    for microbatch in (0, 0, 1):
        torch.rand(5)
        with keyed(RandomKey(0, 0, microbatch)):
            drawn.append(compiled(torch.ones(100)))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# --- computed again ------------------------------------------------------------


def _checkpointed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)


def test_what_a_backward_pass_computes_again_draws_what_it_drew_before(keyed_module: GraphModule) -> None:
    gradients = []
    for run in (lambda module, x: module(x), _checkpointed):
        x = torch.ones(100, requires_grad=True)
        with keyed(RandomKey(0, 0, 1)):
            y = run(keyed_module, x)
        torch.rand(3)
        before = torch.get_rng_state()
        with keyed(RandomKey(0, 0, 1), backward=True):
            y.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_the_key_of_a_backward_pass_holds_in_a_thread_that_sees_no_context() -> None:
    drawn = []

    def draw() -> None:
        enter_site(3)
        drawn.append(torch.rand(5))

    for backward in (True, False):
        with keyed(RandomKey(0, 0, 1), backward=backward):
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
    assert torch.equal(drawn[0], _draws(RandomKey(0, 0, 1), 3, 5))
    assert not torch.equal(drawn[0], drawn[1])
