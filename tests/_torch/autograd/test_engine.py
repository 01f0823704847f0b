from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from partita._torch.autograd.engine import (
    AsSaved,
    accumulates_inside,
    forget_hooks,
    free_saved,
    gradient_nbytes,
    hook_saved,
    hooks_made,
    hooks_paused,
    inputs_of,
    is_large,
    is_opaque,
    leaf_of,
    let_go_of_leaves,
    run_backward,
    run_nodes,
    sequence_number,
    watch_gradient,
)
from partita.errors import ExecutionError


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_a_run_of_the_engine_accumulates_or_returns() -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    product = weight * x
    run_backward([product], [torch.full((3,), 2.0)], [weight], accumulate=True, keep_graph=True)
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert x.grad is None
    unused = torch.ones(3, requires_grad=True)
    gradients = run_backward([product], [torch.ones(3)], [x, unused], accumulate=False, keep_graph=True)
    assert torch.equal(gradients[0], torch.ones(3))
    assert gradients[1] is None
    edge = GradientEdge(product.grad_fn, 0)
    run_backward([edge], [torch.ones(3)], accumulate=True)
    assert torch.equal(weight.grad, torch.full((3,), 3.0))
    assert torch.equal(x.grad, torch.ones(3))


def test_nodes_run_by_themselves_for_the_edges_that_are_wanted() -> None:
    layers = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
    x, seed = torch.randn(4, 3, requires_grad=True), torch.randn(4, 2)
    for layer in layers:
        layer.weight.register_hook(lambda gradient: 2 * gradient)  # hooks are for those who go on from there
    first, second = layers[0](x).grad_fn, layers[1](torch.randn(4, 2)).grad_fn
    bias, to_x, weight = (GradientEdge(*edge) for edge in first.next_functions)
    (other,) = (GradientEdge(*edge) for edge in second.next_functions if edge[0] is not None)
    results = run_nodes([(first, (seed,)), (second, (seed,))], [bias, weight, other])
    of_bias, of_x, of_weight = results[0]
    assert of_x is None
    assert torch.equal(of_bias, seed), "not yet summed to the shape of the bias"
    assert torch.equal(of_weight.t(), seed.t() @ x)
    assert [gradient is None for gradient in results[1]].count(False) == 1
    assert run_nodes([(layers[0](x).grad_fn, (seed,))], [to_x])[0][1].shape == x.shape
    assert layers[0].weight.grad is layers[1].weight.grad is x.grad is None
    with pytest.raises(TypeError):
        run_nodes([(first, ("no tensor",))], [bias])  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [2, 2**14])
def test_nodes_that_have_run_by_themselves_let_go_of_what_they_saved(rows: int) -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(rows, 3, requires_grad=True)
    halved = x / 2
    product = halved * weight
    saved = ref(halved)
    del halved
    node = product.grad_fn
    gradients = (torch.ones(rows, 3),)
    run_nodes([(node, gradients)], [GradientEdge(*node.next_functions[1])])
    assert is_large(gradients) == (saved() is None) == (rows > 2)
    free_saved(node)
    assert saved() is None
    with pytest.raises(ExecutionError, match="was freed"):
        product.sum().backward()


def test_how_large_the_gradient_along_an_edge_is() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    of_x, of_weight = (torch.ones(2, 3, requires_grad=True) * weight).grad_fn.next_functions
    assert gradient_nbytes(GradientEdge(*of_x)) == 2 * 3 * 4
    assert gradient_nbytes(GradientEdge(*of_weight)) == 3 * 2
    parts = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged).requires_grad_()
    (edge, *_) = (nested * 2).grad_fn.next_functions
    assert gradient_nbytes(GradientEdge(*edge)) == 0


def test_a_node_takes_a_gradient_for_each_output() -> None:
    x = torch.ones(4, requires_grad=True)
    assert inputs_of((x * 2).grad_fn) == 1
    assert inputs_of(x.split(1)[0].grad_fn) == 4


def test_hooks_that_are_made_are_counted() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    before = hooks_made()
    x.register_hook(lambda gradient: gradient)
    assert hooks_made() > before


def test_a_leafs_node_knows_it_and_others_do_not() -> None:
    x = torch.ones(3, requires_grad=True)
    doubled = x * 2
    ((node, _), _) = doubled.grad_fn.next_functions
    assert leaf_of(node) is x
    assert leaf_of(doubled.grad_fn) is None


def test_later_nodes_have_larger_numbers() -> None:
    first = torch.ones(3, requires_grad=True) * 2
    second = first * 3
    assert sequence_number(second.grad_fn) > sequence_number(first.grad_fn)


def test_custom_functions_compute_all_gradients_at_once_and_operators_do_not() -> None:
    x = torch.ones(3, requires_grad=True)
    assert is_opaque(Double.apply(x).grad_fn)
    assert not is_opaque((x * 2).grad_fn)
    assert not is_opaque(nn.Linear(3, 3)(x[None]).grad_fn)


def test_kernels_that_compute_all_gradients_at_once_are_known() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    norm = nn.BatchNorm1d(3)
    assert is_opaque(norm(x).grad_fn)
    assert not is_opaque(norm.eval()(x).grad_fn)  # which reads the batch for the weights alone
    assert not is_opaque(nn.LayerNorm(3)(x).grad_fn)
    assert is_opaque(nn.PReLU()(x).grad_fn)
    query = x[None, None]
    assert is_opaque(nn.functional.scaled_dot_product_attention(query, query, query).grad_fn)


def test_a_saved_tensor_with_a_hook_is_seen() -> None:
    x, linear = torch.ones(2, 3, requires_grad=True), nn.Linear(3, 3)
    assert is_opaque(checkpoint(linear, x, use_reentrant=False).grad_fn)
    with torch.autograd.graph.save_on_cpu():
        assert is_opaque(linear(x).grad_fn)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: AsSaved.pack(tensor.clone()), AsSaved()):
        output = linear(x)
    assert not is_opaque(output.grad_fn)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], linear.weight.sum(0).expand(2, -1))


def test_hooks_get_what_a_node_has_saved_already_unless_it_was_written_to() -> None:
    def double(node: Any) -> bool:
        return hook_saved(node, lambda tensor: tensor is weight, lambda tensor: 2 * tensor, lambda it: it)

    x, weight = torch.ones(3, requires_grad=True), torch.ones(3)
    product = x * weight
    assert double(product.grad_fn)
    weight.add_(5)
    product.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    product = x * weight
    weight.add_(5)
    assert double(product.grad_fn)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    assert not double((x * 2).grad_fn)


def test_a_reentrant_checkpoint_is_told_from_other_functions() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert accumulates_inside(checkpoint(nn.Linear(3, 3), x, use_reentrant=True).grad_fn)
    assert not accumulates_inside(Double.apply(x).grad_fn)
    assert not accumulates_inside((x * 2).grad_fn)


def test_paused_hooks_do_not_run_and_are_there_again_afterwards() -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[str] = []
    weight.register_hook(lambda gradient: seen.append("before"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    with hooks_paused([weight]):
        (weight * 2).sum().backward()
    assert seen == []
    (weight * 2).sum().backward()
    assert seen == ["before", "after"]


def test_paused_hooks_are_there_again_after_an_error() -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[int] = []
    weight.register_hook(lambda gradient: seen.append(1))
    with pytest.raises(KeyError), hooks_paused([weight]):
        raise KeyError("x")
    (weight * 2).sum().backward()
    assert seen == [1]


def test_a_watched_leafs_gradient_is_shown_after_its_hooks_and_not_counted() -> None:
    leaf = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient * 2)
    shown: list[Tensor] = []
    before = hooks_made()
    watch_gradient(leaf, shown.append)
    watch_gradient(other, shown.append)
    assert hooks_made() == before
    (leaf * other).sum().backward()
    assert sorted(gradient.tolist() for gradient in shown) == [[1.0, 1.0], [2.0, 2.0]]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0]
    handle = other.register_hook(lambda gradient: gradient)  # more can be registered
    handle.remove()


def test_hooks_of_compilers_are_not_counted() -> None:
    x = torch.ones(1, requires_grad=True)
    before = hooks_made()
    x.register_hook(lambda gradient: gradient)
    assert hooks_made() == before + 1
    forget_hooks(before)
    assert hooks_made() == before
    x.register_hook(lambda gradient: gradient)
    assert hooks_made() == before + 1


def test_a_run_is_not_traced_by_compiled_autograd_which_is_on_again_afterwards() -> None:
    traced: list[object] = []

    def compiler(gm: object) -> object:
        traced.append(gm)
        return gm

    weight = nn.Parameter(torch.ones(3))
    with compiled_autograd._enable(compiler):
        run_backward([2 * weight], [torch.ones(3)], accumulate=True)
        assert torch.equal(weight.grad, torch.full((3,), 2.0))
        assert not traced
        (2 * weight).backward(torch.ones(3))
        assert traced


@contextmanager
def _looked_at() -> Iterator[None]:
    """As by a debugger: it reads the variables of each frame, and so has them once more."""

    def look(frame: Any, *_: Any) -> Any:
        assert frame.f_locals is not None
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("around", [nullcontext, _looked_at])
def test_a_leaf_is_let_go_of_where_only_its_node_has_it(around: Any) -> None:
    weight = torch.randn(3, requires_grad=True)
    leaves = [torch.randn(3, requires_grad=True) for _ in range(4)]
    added, multiplied, kept, unused = leaves
    result = added + multiplied * weight + kept
    nodes = [get_gradient_edge(leaf).node for leaf in leaves]
    del added, multiplied, unused
    with around():
        let_go_of_leaves(leaves)
    assert leaves == []
    assert [node.variable.numel() for node in nodes] == [0, 3, 3, 0]  # type: ignore[attr-defined]
    result.sum().backward(inputs=[weight])
    assert torch.equal(weight.grad, nodes[1].variable)  # type: ignore[arg-type, attr-defined]


class _KeepsCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.results.append(func(*args, **(kwargs or {})))
        return self.results[-1]


class _KeepsOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.results.append(func(*args, **(kwargs or {})))
        return self.results[-1]


@pytest.mark.parametrize("mode", [_KeepsCalls, _KeepsOperations])
def test_a_leaf_that_a_mode_keeps_is_kept(mode: Any) -> None:
    """It kept the tensor too that the owners were counted of, and the leaf was emptied."""
    with mode() as keeping:
        leaves = [torch.randn(3).detach().requires_grad_()]
        node = get_gradient_edge(leaves[0]).node
        let_go_of_leaves(leaves)
    assert node.variable.numel() == 3  # type: ignore[attr-defined]
    assert any(it is node.variable for it in keeping.results)  # type: ignore[attr-defined]


def test_a_leaf_that_somebody_has_is_kept_while_a_compiler_runs() -> None:
    """Dynamo calls functions in another way, and has owners of its own."""
    kept = torch.randn(3, requires_grad=True)
    node = get_gradient_edge(kept).node

    def let_go(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        let_go_of_leaves([kept])
        return 2 * x

    torch.compile(let_go, backend="eager")(torch.ones(2))
    let_go(torch.ones(2))
    assert node.variable.numel() == 3  # type: ignore[attr-defined]
