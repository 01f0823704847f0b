"""Savings, origins, stable memory, mutations, and the signature of a call."""

from __future__ import annotations

import pytest
import torch
from tests.cudagraphs.graphs import Builder, aten
from torch.fx import Graph, symbolic_trace

from partita.cudagraphs import SavingModel, find_input_mutations
from partita.cudagraphs.facts.fixed_addresses import StableMemory
from partita.cudagraphs.facts.source_line import source_line
from partita.cudagraphs.replaying.call_signature import describe_call, modes
from partita.errors import GraphError


def test_a_saving_model_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"launch_s \(-1\)"):
        SavingModel(launch_s=-1)
    with pytest.raises(ValueError, match=r"min_launches \(-1\)"):
        SavingModel(min_launches=-1)


def test_few_launches_are_not_worth_it_whatever_they_save() -> None:
    assert not SavingModel(launch_s=100.0, min_launches=5).is_worth_it(4)
    assert SavingModel(launch_s=100.0, min_launches=5).is_worth_it(5)


def test_bytes_copied_cost() -> None:
    assert SavingModel(launch_s=1.0, copy_s=1.0, replay_s=0.0, bandwidth=10.0).saved_s(5, 1, 20) == 2.0


def test_the_innermost_frame_is_the_source_line() -> None:
    node = Graph().placeholder("x")
    assert source_line(node) == ""
    node.meta["stack_trace"] = (
        'File "a.py", line 1, in f\n    g(x)\nFile "b.py", line 22, in g\n    return x.item()\n'
    )
    assert source_line(node) == "b.py:22: return x.item()"


def test_memory_is_stable_while_somebody_declares_it() -> None:
    memory = StableMemory()
    memory.declare("a", [1, 2])
    memory.declare("b", [2])
    assert [address in memory for address in (0, 1, 2, 3)] == [False, True, True, False]
    memory.declare("a", [3])
    assert [address in memory for address in (1, 2, 3)] == [False, True, True]
    memory.declare("b", ())
    assert 2 not in memory


def test_writes_through_views_are_found_by_storage() -> None:
    gm = symbolic_trace(lambda x, y: (y.view(-1)[1:].add_(1), x + 1))
    assert find_input_mutations(gm.graph) == {1}


def test_inputs_on_one_storage_are_written_together() -> None:
    b = Builder()
    base = b.fake(4, 4)
    with b.mode:
        part = base.view(-1)
    x, y = b.input("x", base), b.input("y", part)
    b.call(aten.add_.Tensor, y, 1.0)
    assert find_input_mutations(b.module(x).graph) == {0, 1}


def test_a_graph_that_belongs_to_no_module_may_not_refer_to_one() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    assert find_input_mutations(graph) == set()
    broken = Graph()
    broken.output(broken.get_attr("weight"))
    with pytest.raises(GraphError, match="belongs to no module"):
        find_input_mutations(broken)


def test_the_switches_of_cudas_libraries_are_modes() -> None:
    before = modes("cuda")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert modes("cuda") != before
    with torch.backends.cudnn.flags(deterministic=True):
        assert modes("cuda") != before
    assert modes("cuda") == before


def test_a_0d_cpu_tensor_is_part_of_the_kind_by_value() -> None:
    def kind(value: float) -> object:
        return describe_call([torch.tensor(value)], "cuda", frozenset(), StableMemory())

    assert kind(1.0) == kind(1.0) != kind(2.0)
    assert kind(0.0) != kind(-0.0)
    assert kind(float("nan")) == kind(float("nan"))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.ones(2), "input 0 lies on cpu, not on cuda"),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "lazy conjugate"),
    ],
)
def test_what_can_not_be_recorded_says_why(value: torch.Tensor, why: str) -> None:
    assert why in str(describe_call([value], "cuda", frozenset(), StableMemory()))
