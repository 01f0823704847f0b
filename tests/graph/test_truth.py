"""The rules against torch itself: what an operator really does to real tensors, its rule must say."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from partita.graph.effect_rules.functions import function_rule, method_rule
from partita.graph.effect_rules.node_effect import PURE, NodeEffect

aten = torch.ops.aten


def words(text: str) -> list[str]:
    return text.split()


X = (torch.arange(16.0).reshape(4, 4) / 16,)
XY = (*X, torch.linspace(-1, 1, 16).reshape(4, 4))
IMAGE = (torch.linspace(0, 1, 32).reshape(1, 2, 4, 4),)
METHODS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        words(
            "sin add_ mul_ zero_ relu_ t contiguous detach detach_ float double half bool to_sparse "
            "clone flatten ravel squeeze view_as reshape_as expand_as type_as sum_to_size cos_ bernoulli_ "
            "normal_ uniform_ exponential_ random_ bernoulli multinomial sort unique abs "
            "positive conj resolve_conj cpu triu tril fill_diagonal_ t_ nan_to_num"
        ),
        X,
    ),
    "add_": (*X, 1),
    "mul_": (*X, 2),
    "view_as": XY,
    "reshape_as": XY,
    "expand_as": XY,
    "type_as": XY,
    "sum_to_size": (*X, 4, 4),
    "fill_diagonal_": (*X, 1.0),
    "multinomial": (*X, 2),
    "copy_": XY,
    "view": (*X, -1),
    "reshape": (*X, 2, 8),
    "narrow": (*X, 0, 0, 2),
    "select": (*X, 0, 1),
    "unfold": (*X, 0, 2, 1),
    "chunk": (*X, 2),
    "split": (*X, 2),
    "unbind": X,
    "tensor_split": (*X, 2),
    "permute": (*X, 1, 0),
    "movedim": (*X, 0, 1),
    "swapaxes_": (*X, 0, 1),
    "expand": (*X, 4, 4),
    "unflatten": (*X, 0, (2, 2)),
    "to": (*X, torch.float32),
    "index_select": (*X, 0, torch.tensor([0])),
    "masked_fill_": (*X, XY[1] > 0, 1.0),
    "index_put_": (*X, [torch.tensor([0])], torch.tensor(1.0)),
    "lerp_": (*X, XY[1], 0.5),
    "addmm_": (*X, *XY),
    "clamp_": (*X, 0, 1),
    "diagonal": X,
    "as_strided": (*X, (2,), (1,)),
    "unsqueeze": (*X, 0),
    "broadcast_to": (*X, (2, 4, 4)),
    "type": (*X, torch.float32),
    "scatter_add_": (*X, 0, torch.zeros(1, 4, dtype=torch.long), XY[1]),
    "__getitem__": (*X, 0),
    "__iadd__": XY,
    "__pos__": X,
}
FUNCTIONS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (torch.broadcast_tensors, XY, {}),
    (torch.meshgrid, (X[0][0], X[0][1]), {"indexing": "ij"}),
    (torch.atleast_2d, X, {}),
    (torch.einsum, ("ij->ij", *X), {}),
    (torch.einsum, ("ij->ji", *X), {}),
    (torch.block_diag, X, {}),
    (torch.cat, (list(XY),), {}),
    (torch.cat, (list(X),), {}),
    (torch.stack, (list(XY),), {}),
    (torch.add, XY, {"out": torch.empty(4, 4)}),
    (torch.sort, X, {"out": (torch.empty(4, 4), torch.empty(4, 4, dtype=torch.long))}),
    (torch.norm, X, {"out": torch.empty(())}),
    (torch.tensordot, (*XY, 1), {"out": torch.empty(4, 4)}),
    (torch.linalg.qr, X, {}),
    (torch.histogramdd, (X[0][:, :1],), {"bins": [torch.tensor([0.0, 1.0, 2.0])]}),
    (torch.as_tensor, X, {}),
    (torch.asarray, X, {}),
    (torch._foreach_add_, (list(XY), 1.0), {}),
    (torch._foreach_mul_, (list(XY), list(XY)), {}),
    (torch.randperm, (4,), {}),
    (torch.normal, X, {"std": 1.0}),
    (torch.poisson, X, {}),
    (torch.rand_like, X, {}),
    (functional.dropout, X, {"training": False}),
    (functional.dropout, X, {"training": True}),
    (functional.dropout, X, {"p": 0.0, "training": True}),
    (functional.dropout2d, IMAGE, {"training": True}),
    (functional.alpha_dropout, X, {"training": False}),
    (functional.rrelu, X, {"training": True}),
    (functional.relu, X, {"inplace": True}),
    (functional.leaky_relu, X, {"inplace": True}),
    (functional.gumbel_softmax, X, {}),
    (functional.fractional_max_pool2d, (*IMAGE, 2), {"output_size": 2}),
    (functional.normalize, X, {"out": torch.empty(4, 4)}),
    (functional.pad, (*X, (0, 0)), {}),
    (functional.interpolate, IMAGE, {"scale_factor": 1}),
    (functional.pixel_shuffle, (*IMAGE, 1), {}),
    (functional.adaptive_avg_pool2d, (*IMAGE, (4, 4)), {}),
    (functional.adaptive_avg_pool2d, (*IMAGE, (None, None)), {}),
    (functional.max_pool2d, (*IMAGE, 1), {}),
    (functional.softmax, (*X, -1), {"dtype": torch.float32}),
    (functional.unfold, (*IMAGE, 1), {}),
    (functional.batch_norm, (*X, torch.zeros(4), torch.ones(4)), {"training": True}),
    (functional.embedding, (torch.tensor([0]), X[0] * 9), {"max_norm": 0.1}),
    (functional.embedding_bag, (torch.tensor([[0]]), X[0] * 9), {"max_norm": 0.1}),
    (functional.scaled_dot_product_attention, (X[0][None], X[0][None], X[0][None]), {"dropout_p": 0.5}),
    (nn.init.normal_, X, {}),
    (operator.setitem, (*X, 0, 1.0), {}),
    (operator.iadd, XY, {}),
    (operator.pos, X, {}),
    (operator.getitem, (*X, slice(0, 2)), {}),
    (operator.add, ([X[0]], [X[0]]), {}),
    (list, (list(XY),), {}),
    (sum, (list(X), 0), {}),
    (max, (X[0][0, 0], X[0][1, 1]), {}),
    (torch.Tensor.split, (*X, 2), {}),
    (torch.Tensor.add_, (*X, 1), {}),
    (getattr, (*X, "T"), {}),
    (getattr, (*X, "data"), {}),
    (aten.native_dropout.default, (*X, 0.5, True), {}),
    (aten.view.default, (*X, [-1]), {}),
    (aten._unsafe_view.default, (*X, [-1]), {}),
    (aten._to_copy.default, X, {}),
    (aten.lift_fresh.default, X, {}),
    (aten.alias.default, X, {}),
    (aten.copy_.default, XY, {}),
    (aten.index_put_.default, (*X, [torch.tensor([0])], torch.tensor(1.0)), {}),
    (aten.split_with_sizes.default, (*X, [2, 2]), {}),
    (aten.bernoulli_.float, X, {}),
    (aten._fused_adam_.default, ([X[0]], [XY[1]], [XY[1]], [XY[1]], [], [torch.tensor(1.0)]),
     {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False,
      "maximize": False}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "args", "kwargs"), FUNCTIONS, ids=lambda value: getattr(value, "__name__", "")[:30]
)
def test_a_function_does_no_more_than_its_rule_says(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _assert_covered("call_function", target, target, args, kwargs)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_does_no_more_than_its_rule_says(name: str) -> None:
    _assert_covered("call_method", name, operator.methodcaller, METHODS[name], {})


def _assert_covered(op: str, target: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
    args, kwargs = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    effect, node_of = _effect(op, target, args, kwargs)
    assert "unknown" not in effect.why
    addresses = {id(tensor): tensor.untyped_storage().data_ptr() for tensor in tensors}
    versions = {id(tensor): tensor._version for tensor in tensors}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    result = run(target, *args[1:])(args[0]) if op == "call_method" else run(*args, **kwargs)
    drew = not torch.equal(state, torch.get_rng_state())
    outputs = [
        leaf
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    shared = {tensor.untyped_storage().data_ptr() for tensor in outputs}
    for tensor in tensors:
        node = node_of[id(tensor)]
        if addresses[id(tensor)] in shared:
            assert node in effect.aliases, f"{node.name} shares storage with the result"
        if tensor._version != versions[id(tensor)]:
            assert node in effect.writes, f"{node.name} was written"
    assert effect.random or not drew, "it drew random numbers"


def _effect(op: str, target: Any, args: Any, kwargs: Any) -> tuple[NodeEffect, dict[int, Any]]:
    graph = Graph()
    node_of: dict[int, Any] = {}

    def lower(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return node_of.setdefault(id(leaf), graph.placeholder(f"t{len(node_of)}"))

    lowered = tree_map(lower, (args, kwargs))
    node = graph.create_node(op, target, *lowered, name="called")
    rule = method_rule(target) if op == "call_method" else function_rule(target)
    return (PURE if rule is None else rule(node)), node_of
