"""What can't be captured is refused with what stands in the way, and with advice that works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from tests.group_of_one import group_of_one
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import partita
from partita.capture import capture
from partita.ddp import replicate
from partita.errors import CaptureError
from partita.pipelining import SplitPoint, pipeline

X = torch.randn(4, 8)


class _Two(nn.Module):
    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8) if first is None else first
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x)))
        return out


def _function(x: Tensor) -> Tensor:
    return x


def _scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(8, 8))  # type: ignore[no-any-return]


def _hooked() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.register_full_backward_hook(lambda *_: None)
    return linear


at_blocks = partial(pipeline, split_spec={"a": SplitPoint.END}, frontend="modules")
FRONT_ENDS: dict[Literal["capture", "modules"], Callable[..., Any]] = {
    "capture": capture,
    "modules": at_blocks,
}


@pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)
@pytest.mark.parametrize(
    ("model", "args", "text"),
    [
        (_function, (X,), r"the model is a torch\.nn\.Module, got function"),
        (_Two, (X,), r"the model is a torch\.nn\.Module, got type: make one, _Two\(\.\.\.\)"),
        (_Two(), X, r"args is a tuple of positional arguments, got Tensor: write \(x,\)"),
        (_Two(), {"x": X}, r"positional arguments, got dict: give \(\) there, and arguments by name as the"),
        (_Two(nn.LazyLinear(8)), (X,), r"parameters without a shape yet \('a\.weight' and 1 more\): call it"),
    ],
    ids=["function", "class", "args", "named", "lazy"],
)
def test_what_nothing_can_be_made_of_is_refused_at_once(
    front_end: Callable[..., Any], model: Any, args: Any, text: str
) -> None:
    with pytest.raises(CaptureError, match=text):
        front_end(model, args)


@pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)
def test_a_tensor_parallel_model_is_refused(front_end: Callable[..., Any]) -> None:
    """Export spoke of a type that is not graphable, the other front end of a missing attribute."""
    with group_of_one():
        model = _Two()
        mesh = init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
        text = r"_Two is distributed over a mesh already \('a\.weight' and 3 more; 'a\.weight' is \(Shard"
        with pytest.raises(CaptureError, match=text):
            front_end(model, (X,))


def test_a_data_parallel_model_is_refused_and_the_advice_works() -> None:
    """Export's text for a sharded model was that of a missing attribute, and the other front end cut what
    `replicate` returned into stages whose gradients nobody reduced.
    """
    with group_of_one():
        sharded = _Two()
        fully_shard(sharded.b)
        wrapped, replica = DistributedDataParallel(_Two()), replicate(_Two())
        for model, where in ((sharded, "'b' is a FSDPLinear"), (wrapped, "whole"), (replica, "whole")):
            for front_end in FRONT_ENDS.values():
                with pytest.raises(
                    CaptureError, match=rf"is data parallel already \(.*{where}\), and the st"
                ):
                    front_end(model, (X,))
        replica.replication.close()
        for advised in (replica, wrapped.module):
            assert isinstance(advised, nn.Module)
            assert torch.equal(at_blocks(advised, (X,))(X), advised(X))
        del wrapped


@pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)
def test_what_torch_compile_returned_is_refused_and_the_advice_works(front_end: Callable[..., Any]) -> None:
    """The graph was said to be another model, since Inductor rounds otherwise, after half a minute of
    attempts.
    """
    model = _Two()
    with pytest.raises(CaptureError, match=r"what torch\.compile returned.*pipeline\(\.\.\., compile=True\)"):
        front_end(torch.compile(model, backend="aot_eager"), (X,))
    pipe = pipeline(model, (X,), split_spec={"b": SplitPoint.BEGINNING}, compile="aot_eager")
    assert torch.equal(pipe(X), model(X))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)
def test_a_model_without_python_code_is_refused(front_end: Callable[..., Any]) -> None:
    with pytest.raises(
        CaptureError, match=r"of torch\.jit, whose Python code is gone: give the module that it"
    ):
        front_end(torch.jit.script(_Two()), (X,))


def test_a_graph_of_torch_export_is_refused_and_the_advice_works() -> None:
    """It said that train() is not supported yet, and to take `.item()` out of forward."""
    graph = torch.export.export(_Two(), (X,)).module()
    with pytest.raises(CaptureError, match=r"it is a graph that torch\.export made.* partita\.split\. "):
        capture(graph, (X,))
    cut = partita.split(graph, lambda node: node.name)
    partita.verify(cut, graph, (X,)).check()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("first", "text"),
    [
        (_scripted, r"'a' is a module of torch\.jit"),
        (_hooked, r"'a' has a backward hook, which no trace takes"),
        (partial(nn.BatchNorm1d, 8, momentum=None), r"'a' has momentum=None.*Give it a momentum, or"),
    ],
)
def test_a_part_that_no_trace_takes_is_named_and_the_advice_works(
    first: Callable[[], nn.Module], text: str
) -> None:
    model = _Two(first())
    with pytest.raises(CaptureError, match=text) as raised:
        capture(model, (X,), prove=True)
    assert "Take what can't be traced" not in str(raised.value)
    if first is _scripted:
        with pytest.raises(
            CaptureError, match=r"for 'a\.weight'.*torch\.jit: put the module there that it was"
        ):
            at_blocks(model, (X,))
    else:
        assert torch.equal(at_blocks(model, (X,))(X), model(X))
    model.a = nn.Linear(8, 8)
    assert capture(model, (X,), prove=True).proof.holds


class _Meta(nn.Module):
    """Has a child by a name that `GraphModule` needs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(8, 8))
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(getattr(self, self.name)(x)))
        return out


def test_a_name_that_a_graph_can_not_have_is_named_and_the_advice_works() -> None:
    """The message was torch's: "Node meta_weight target meta.weight references nonexistent attribute"."""
    model = _Meta("meta")
    with pytest.raises(
        CaptureError, match=r"has 'meta', and a graph of torch has something else by that name"
    ):
        capture(model, (X,))
    pipe = pipeline(model, (X,), split_spec={"meta": SplitPoint.END}, frontend="modules")
    assert torch.equal(pipe(X), model(X))
    assert capture(_Meta("meta_features"), (X,), prove=True).proof.holds


def test_a_lazy_model_is_captured_after_a_call() -> None:
    model = _Two(nn.LazyLinear(8))
    model(X)
    assert capture(model, (X,), prove=True).proof.holds


class _TakesGradients(_Two):
    """A gradient penalty on what the second layer makes."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.enable_grad():
            start = hidden.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.b(start).tanh().sum(), start, create_graph=True)
        return hidden.mean(1) + gradient.norm(dim=1)


class _Checkpoints(_Two):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.a, self.b(x), use_reentrant=self.reentrant)
        return out


def test_of_what_no_trace_takes_the_cause_is_said_and_not_torchs_text() -> None:
    """Both ended in pages of torch's text, which named neither the cause nor what to do."""
    x = X.clone()
    causes = r"forward (takes gradients itself \(torch.autograd.grad\)|lets a tensor require gradients)"
    with pytest.raises(CaptureError, match=causes) as caught:  # the latter by torch 2.11
        capture(_TakesGradients(), (x,))
    assert len(str(caught.value)) < 400
    with pytest.raises(CaptureError, match="Write use_reentrant=False: it computes the same") as caught:
        capture(_Checkpoints(True), (x,), prove=True)
    assert len(str(caught.value)) < 400
    # what is advised:
    capture(_Checkpoints(False), (x,), prove=True)
    model = _TakesGradients()
    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING}, frontend="modules")
    assert torch.equal(pipe(x), model(x))


class _DiffersByItsInput(_Two):
    """A derivative of the input of all that comes behind it, as physics-informed networks take it."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(self.a(x).sum(), x, create_graph=True)
        return self.b(slope)  # type: ignore[no-any-return]


class _MakesAParameter(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(()))
        return self.b(self.a(x)) * self.scale  # type: ignore[no-any-return]


class _Rows:
    """What a library hands to its models in place of tensors."""

    def __init__(self, x: Tensor, scale: float) -> None:
        self.x = x
        self.scale = scale


class _OfRows(_Two):
    def forward(self, rows: _Rows) -> Tensor:  # type: ignore[override]
        return super().forward(rows.x) * rows.scale


def test_of_an_argument_of_a_class_of_its_own_the_cause_is_said_and_the_advice_works() -> None:
    model, rows = _OfRows(), _Rows(X, 0.5)
    with pytest.raises(CaptureError, match=r"holds, a tests\.capture\.test_refusal\._Rows, and torch does"):
        capture(model, (rows,))
    assert partita.verify(pipeline(model, (rows,), stages=2, frontend="modules"), model, (rows,)).ok
    pytree.register_pytree_node(
        _Rows, lambda rows: ([rows.x], rows.scale), lambda leaves, scale: _Rows(*leaves, scale)
    )
    try:
        with pytest.raises(CaptureError, match=r"register_pytree_node with flatten_with_keys_fn="):
            capture(model, (rows,))
    finally:
        pytree._deregister_pytree_node(_Rows)


class _Masked(_Two):
    def forward(self, x: Tensor, documents: Any) -> Tensor:  # type: ignore[override]
        mask = documents if isinstance(documents, BlockMask) else _mask(documents, x.shape[0])
        out: Tensor = flex_attention(self.a(x), self.b(x), x, block_mask=mask)
        return out


def _mask(documents: Tensor, samples: int) -> BlockMask:
    return create_block_mask(
        lambda b, _h, q, k: documents[b, q] == documents[b, k], samples, None, 16, 16, device="cpu"
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_of_a_block_mask_the_cause_is_said_and_the_advice_works() -> None:
    model = _Masked().eval().requires_grad_(False)
    x, documents = torch.randn(2, 2, 16, 8), (torch.arange(16) // 5).expand(2, 16)
    with pytest.raises(
        CaptureError, match=r"an argument is a BlockMask.*call create_block_mask\(\) in forward"
    ):
        capture(model, (x, _mask(documents, 2)), modes="eval")
    assert torch.equal(
        capture(model, (x, documents), modes="eval").graphs()[False](x, documents), model(x, documents)
    )


def test_of_a_model_on_the_meta_device_the_cause_is_said_and_the_advice_works() -> None:
    """torch's text about two devices did not say which was wrong."""
    with torch.device("meta"):
        model = _Two()
    text = r"weights on the meta device, and the example is on another.* \(x.to\('meta'\)\)"
    with pytest.raises(CaptureError, match=text):
        capture(model, (X,))
    assert capture(model, (X.to("meta"),)).module(X.to("meta")).is_meta


def test_of_a_tensor_that_forward_lets_require_gradients_the_cause_is_said() -> None:
    """It was called a fake tensor in the constants of an exported program."""
    with pytest.raises(CaptureError, match=r"lets a tensor require gradients \(requires_grad_\(\)\)"):
        capture(_DiffersByItsInput(), (X.clone(),))
    model = _DiffersByItsInput()  # what is advised:
    at_b = {"b": SplitPoint.BEGINNING}
    pipe = pipeline(model, (X.clone(),), split_spec=at_b, frontend="modules", modes="train")
    assert torch.equal(pipe(X.clone()), model(X.clone()))


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_model_that_makes_a_parameter_in_its_first_call_is_to_be_called_before(frontend: Any) -> None:
    """A cut by modules spoke of the meta device, and a capture of a tensor that the candidate lacks."""
    model = _MakesAParameter()
    with pytest.raises(CaptureError, match=r"forward makes a parameter .*call the model once, on an example"):
        pipeline(model, (X.clone(),), stages=2, frontend=frontend)
    assert model.scale is None
    model(X)
    partita.verify(pipeline(model, (X.clone(),), stages=2, frontend=frontend), model, (X.clone(),)).check()


class _AddsABuffer(nn.Module):
    """Like the ALiBi biases of x-transformers: a table made in the first call, in place of None."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.register_buffer("table", torch.arange(8.0), persistent=False)
        return self.b(self.a(x) + self.table)


def test_a_model_that_adds_a_buffer_in_its_first_call_is_to_be_called_before() -> None:
    """It was told to take what can't be traced out of forward."""
    model = _AddsABuffer()
    with pytest.raises(CaptureError, match=r"forward adds a tensor .*call the model once, on an example"):
        pipeline(model, (X.clone(),), stages=2)
    model(X)
    partita.verify(pipeline(model, (X.clone(),), stages=2), model, (X.clone(),)).check()


class _GivenAModule(torch.autograd.Function):
    """Takes gradients in backward, by a module that it was handed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *_: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            inner = ctx.module
            first, *others = torch.autograd.grad(inner(x), [x, *inner.parameters()], gradients)
        return first, None, *others


class _HandsOver(_Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(_GivenAModule.apply(x, self.a, *self.a.parameters()))  # type: ignore[no-any-return]


def test_a_function_that_is_given_a_module_is_named() -> None:
    """It was said that forward takes gradients, which strict mode finds in the backward pass."""
    with pytest.raises(
        CaptureError, match=r"_GivenAModule\.apply is given a Linear that holds tensors"
    ) as caught:
        capture(_HandsOver(), (X.clone(),))
    assert "forward takes gradients itself" not in str(caught.value)
    model = _HandsOver()
    pipe = pipeline(model, (X.clone(),), stages=2, frontend="modules")  # what is advised
    partita.verify(pipe, model, (X.clone(),)).check()
