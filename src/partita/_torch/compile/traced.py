"""All graphs that ``torch.compile`` and AOTAutograd make of one call of a model, and where they broke."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo import config
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import fake_tensor_tls
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from partita._torch.compile.aot import AotGraph, compile_ahead
from partita._torch.compile.graph_breaks import Break, recorded_breaks

__all__ = ["TracedModel", "pretend_device", "trace_model"]

_EXPLAINS = "Explanation: "
_USER_LINE = re.compile(r'File "([^"]+)", line (\d+), in .*\n\s*([^\n]+)')


@dataclass
class TracedModel:
    """What `trace_model` found, in order.

    Attributes:
        breaks: where a graph ends.
        host_reads: nodes of Dynamo's graphs at which one would end with torch's default options: what reads a
            number from a tensor, or makes a size that the data decides. Empty where the graphs are run.
        stopped: why the rest of the model is not here, or an empty string.
        result: what the model returned; None where it stopped.
    """

    graphs: list[AotGraph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    host_reads: list[Node] = field(default_factory=list)
    stopped: str = ""
    result: Any = None


def trace_model(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool, compute: bool
) -> TracedModel:
    """Call a model once through ``torch.compile``, and keep its graphs.

    Args:
        train: with gradients, and the backward of the sum of its results.
        compute: run the graphs. False: results have the right shapes, and zeros in them, so that models and
            arguments on the meta device will do; what the host reads from a tensor then stays in the graph.

    Raises:
        Exception: whatever the model raises, unless values were missing because nothing is computed.
    """
    traced = TracedModel()

    def compile_graph(graph: AotGraph) -> Any:
        traced.graphs.append(graph)
        return graph.gm if compute else _Zeros(graph.gm)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        traced.host_reads += [] if compute else _host_reads(gm)
        return compile_ahead(gm, inputs, compile_graph)

    patch = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    compiled = torch.compile(module, backend=backend)
    with (
        nullcontext() if compute else config.patch(patch),
        nullcontext() if compute else _real_constants(),
        torch.set_grad_enabled(train),
        warnings.catch_warnings(),
        recorded_breaks() as breaks,
    ):
        # Dynamo looks at the gradients of what one graph gives to the next
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        try:
            traced.result = compiled(*args, **kwargs)
            if train:
                _backward(traced.result)
        except Exception as error:
            if compute:
                raise
            traced.stopped = _reason(error)
    traced.breaks += breaks
    return traced


def pretend_device(graphs: Sequence[AotGraph], instead_of: str, device: torch.device) -> None:
    """Let the example values on one type of device say that they lie on another, which need not be there."""
    for graph in graphs:
        nodes = list(graph.gm.graph.nodes)
        values = [value for node in nodes for value in tree_leaves(node.meta.get("val"))]
        fakes = [value for value in values if isinstance(value, FakeTensor)]
        for node in nodes:
            constant = _constant(graph.gm, node)
            if fakes and constant is not None and constant.device.type == instead_of:
                node.meta["val"] = fakes[0].fake_mode.from_tensor(constant)
                fakes.append(node.meta["val"])
        for value in fakes:
            if value.fake_device.type == instead_of:
                value.fake_device = device


def _constant(gm: GraphModule, node: Node) -> torch.Tensor | None:
    """The tensor that a node reads from the graph's module, unless the node's example value is a fake one."""
    if node.op != "get_attr" or isinstance(node.meta.get("val"), FakeTensor):
        return None
    value = getattr(gm, str(node.target), None)
    return value if isinstance(value, torch.Tensor) else None


@contextmanager
def _real_constants() -> Iterator[None]:
    """Let operators take what ``torch.tensor(..., device="meta")`` makes while a model is traced.

    Elsewhere such a constant becomes a fake tensor; on the meta device it stays a real one, which Dynamo then
    refuses beside fake ones (the caches of ``transformers`` begin with an empty one).
    """
    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = True
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before


def _host_reads(gm: GraphModule) -> Iterator[Node]:
    """The nodes whose value, or size, only the data decides, and whose operands are of known sizes."""
    for node in gm.graph.nodes:
        values = tree_leaves(node.meta.get("example_value"))
        if node.op == "placeholder" or not any(map(free_unbacked_symbols, values)):
            continue
        operands = [leaf for each in node.all_input_nodes for leaf in tree_leaves(each.meta["example_value"])]
        if not any(map(free_unbacked_symbols, operands)):
            yield node


class _Zeros:
    """Results of the right shapes, and nothing is run."""

    def __init__(self, gm: GraphModule) -> None:
        output = gm.graph.output_node().args[0]
        assert isinstance(output, (tuple, list))
        self._examples = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output]

    def __call__(self, *_args: Any) -> list[Any]:
        return [_zeros(example) for example in self._examples]


def _zeros(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        sizes, strides = (tuple(map(_number, values)) for values in (example.shape, example.stride()))
        return torch.empty_strided(sizes, strides, dtype=example.dtype, device=example.device).zero_()
    return _number(example) if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)) else example


def _number(value: Any) -> Any:
    """The value of a symbol in the example; 1 where only data could tell."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.pytype(value.node.hint if value.node.has_hint() else 1)


def _backward(result: Any) -> None:
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


def _reason(error: Exception) -> str:
    """The error in torch's own words, and the line of the user's code: the innermost that torch names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    text += next((f": {line.removeprefix(_EXPLAINS)}" for line in lines if line.startswith(_EXPLAINS)), "")
    named = _USER_LINE.findall(str(error))
    if named:
        file, number, code = named[-1]
        return f"{type(error).__name__}: {text} at {file}:{number}: {code.strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}: {text}{place}"
