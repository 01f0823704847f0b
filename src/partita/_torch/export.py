"""What ``torch.export`` leaves behind in its graphs: region wrappers, and how inputs and outputs are flattened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.export._tree_utils import reorder_kwargs
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

__all__ = ["WRAP_AUTOCAST", "WRAP_SET_GRAD", "Signature", "signature_of", "unlifted"]

WRAP_AUTOCAST: Any = wrap_with_autocast
WRAP_SET_GRAD: Any = wrap_with_set_grad_enabled


def unlifted(program: torch.export.ExportedProgram) -> GraphModule:
    """The program as a module that owns its state under the original names, without the input checks at its head."""
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    for name in ("train", "eval"):  # export blocks them, because a captured graph ignores the flag; ours does not
        module.__dict__.pop(name, None)
    return module


class Signature:
    """How the arguments of an exported module become its placeholders, and its flat outputs what the model returned."""

    def __init__(self, in_spec: pytree.TreeSpec, out_spec: pytree.TreeSpec, names: Sequence[str]) -> None:
        self.in_spec = in_spec
        self.out_spec = out_spec
        self.names = tuple(names)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """One value a placeholder, in order.

        Raises:
            ValueError: the arguments have another structure than those that the model was captured with.
        """
        ordered = reorder_kwargs(dict(kwargs), self.in_spec) if kwargs else {}
        flat, spec = pytree.tree_flatten((args, ordered))
        if spec != self.in_spec:
            raise ValueError(f"the arguments have the structure {spec}, the model was captured with {self.in_spec}")
        return flat

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """The model's own output structure."""
        return pytree.tree_unflatten(list(flat), self.out_spec)


def signature_of(module: GraphModule) -> Signature:
    """The signature of an exported module (one made by `unlifted`)."""
    info = module.graph._codegen.pytree_info  # type: ignore[attr-defined]
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return Signature(info.in_spec, info.out_spec, names)
