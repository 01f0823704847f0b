"""Example values for the nodes of a graph that has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.lazy_module import lazy_module

__all__ = ["copy_graph_module", "example_tensors", "with_example_values"]


def example_tensors(shape: Sequence[int], devices: Sequence[str]) -> list[torch.Tensor]:
    """A fake float32 tensor on each of these devices, which need not be there."""
    with FakeTensorMode():
        return [torch.empty(tuple(shape), device=device) for device in devices]


def copy_graph_module(gm: GraphModule) -> GraphModule:
    """Return a module around a copy of ``gm``'s graph, with the same parameters, buffers and submodules."""
    result = lazy_module(copy_graph(gm.graph), type(gm).__name__, training=gm.training)
    for key, value in vars(gm).items():
        if key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(result)[key] = value.copy()
        elif key not in vars(result):
            vars(result)[key] = value
    result.meta = dict(gm.meta)
    return result


def with_example_values(gm: GraphModule, inputs: Sequence[Any], skip: Callable[[Node], bool]) -> GraphModule:
    """Return a copy of ``gm`` whose nodes have fake example values in ``meta["val"]``.

    Nothing is computed, and nothing in ``gm`` changes. A node whose value depends on data has none, nor have
    those that use it.

    Args:
        inputs: one value a placeholder; fake or real.
        skip: nodes that must not be run, such as a print.
    """
    mode = detect_fake_mode(list(inputs)) or _mode()
    result = copy_graph_module(gm)
    run = _Examples(result, mode, skip)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        run.run(*map(run.fake, inputs), enable_io_processing=False)
    return result


def _mode() -> FakeTensorMode:
    """Return a mode that makes symbols for sizes and numbers that depend on data."""
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


class _Examples(Interpreter):
    """Runs what it can, on fake tensors."""

    def __init__(self, gm: GraphModule, mode: FakeTensorMode, skip: Callable[[Node], bool]) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._mode = mode
        self._skip = skip
        self._missing: set[Node] = set()

    def fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self._mode.from_tensor(value, static_shapes=True)

    def run_node(self, n: Node) -> Any:
        if n.op == "output":
            return None
        n.meta.pop("val", None)
        if self._skip(n) or any(operand in self._missing for operand in n.all_input_nodes):
            self._missing.add(n)
            return None
        try:
            with self._mode:
                result = super().run_node(n)
        except Exception:  # whatever an operator raises on what it can't know, the node has no example value
            self._missing.add(n)
            return None
        if n.op == "get_attr":
            result = self.fake(result)
        n.meta["val"] = result
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on fake copies of the module's state, which therefore stays as it is."""
        module = self.fetch_attr(target)
        state = {
            name: self.fake(tensor)
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named()
        }
        return torch.func.functional_call(module, state, args, kwargs)
