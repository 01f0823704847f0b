"""What torch knows about recording an operator into a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from partita._torch.operators.schemas import aten_packet, is_operator

__all__ = ["CaptureFacts", "capture_facts", "has_data_dependent_size", "operator_of"]

_BUILT_IN = frozenset({"aten", "prims", "prim", "inductor", "rngprims"})
# Operators that wait for the device, or read from it, although no tag says so.
_SYNCHRONISING = frozenset(
    [
        "is_nonzero",
        "allclose",
        "multinomial",
        "histc",
        "histogram",
        "mode",
        "_linalg_check_errors",
        "_assert_scalar",
        "embedding_renorm_",
        "embedding_dense_backward",
        "_embedding_bag_dense_backward",
        "ctc_loss",
        "_ctc_loss",
        "_ctc_loss_backward",
        "_cudnn_ctc_loss",
        "_use_cudnn_ctc_loss",
        "_fused_moving_avg_obs_fq_helper",
        "_fused_moving_avg_obs_fq_helper_functional",
        "cholesky",
        "cholesky_inverse",
        "cholesky_solve",
        "geqrf",
        "lu_solve",
        "lu_unpack",
        "ormqr",
        "qr",
        "svd",
        "triangular_solve",
        "inverse",
        "logdet",
        "slogdet",
        "det",
        "matrix_exp",
        "pinverse",
        "lstsq",
    ]
)
_SOLVER_PREFIXES = ("linalg_", "_linalg_", "_cholesky")
_NO_SOLVER = frozenset(
    [
        "linalg_vector_norm",
        "linalg_norm",
        "linalg_matrix_norm",
        "linalg_cross",
        "linalg_diagonal",
        "linalg_vecdot",
        "linalg_matmul",
        "linalg_multi_dot",
        "linalg_matrix_power",
    ]
)
_REBINDING = frozenset(["resize_", "resize_as_", "set_", "set_data", "swapaxes_", "swapdims_"])


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """What decides whether an operator can be captured.

    Attributes:
        name: with its namespace, ``aten::add``.
        is_built_in: it comes with torch; of others nobody knows what they do on the host.
        reads_host: its result is a number that the host gets from the device.
        dynamic_shape: the shape of its result depends on data (for indexing: only where an index is a mask).
        synchronises: it waits for the device.
        rebinds: it changes the shape or the memory of a tensor in place.
        unsafe: its author tagged it as not fit for CUDA graphs.
        pointwise: it takes a 0-d CPU tensor beside tensors on the device, by value.
        indexes: it takes a list of index tensors.
        launches: it starts work on the device; False for views.
        dropout_at: the position of its argument ``dropout_p``; None where it has none. Attention that drops
            out hands the seed of its random numbers to its backward pass: on the host, or, where it is
            captured, on the device. Where only one of the two is captured, the wrong memory is read.
    """

    name: str
    is_built_in: bool
    reads_host: bool = False
    dynamic_shape: bool = False
    synchronises: bool = False
    rebinds: bool = False
    unsafe: bool = False
    pointwise: bool = False
    indexes: bool = False
    launches: bool = True
    dropout_at: int | None = None


def operator_of(node: Node) -> Any:
    """The operator that a node calls as far as it is known: an overload, a packet, or None.

    Functions such as ``torch.nonzero`` and methods stand for the packet of their name.
    """
    if node.op == "call_method":
        return aten_packet(str(node.target))
    if node.op != "call_function":
        return None
    if is_operator(node.target):
        return node.target
    module = getattr(node.target, "__module__", None) or ""
    if module in ("torch", "torch.functional", "torch._tensor") or module.startswith("torch._C"):
        return aten_packet(getattr(node.target, "__name__", ""))
    return None


@cache
def capture_facts(target: Any) -> CaptureFacts:
    """The facts of an overload; of a packet those of any of its overloads that takes a tensor."""
    overloads = [target] if isinstance(target, OpOverload) else _of_tensors(target)
    tags = {tag for overload in overloads for tag in overload.tags}
    qualified = overloads[0]._schema.name
    namespace, _, name = qualified.partition("::")
    solver = name.startswith(_SOLVER_PREFIXES) and name not in _NO_SOLVER
    indexes = any(
        argument.name == "indices" and str(argument.type).startswith("List[Optional[Tensor]")
        for overload in overloads
        for argument in overload._schema.arguments
    )
    return CaptureFacts(
        name=qualified,
        is_built_in=namespace in _BUILT_IN,
        reads_host=torch.Tag.data_dependent_output in tags,
        dynamic_shape=torch.Tag.dynamic_output_shape in tags,
        synchronises=name in _SYNCHRONISING or solver,
        rebinds=name in _REBINDING or torch.Tag.inplace_view in tags,
        unsafe=torch.Tag.cudagraph_unsafe in tags,
        pointwise=torch.Tag.pointwise in tags,
        indexes=indexes,
        launches=not all(map(_is_view, overloads)),
        dropout_at=next(
            (at for at, it in enumerate(overloads[0]._schema.arguments) if it.name == "dropout_p"), None
        ),
    )


def has_data_dependent_size(value: Any) -> bool:
    """Whether a value, or its shape, contains a symbol that only the data decides."""
    return bool(free_unbacked_symbols(value))


def _of_tensors(packet: Any) -> list[OpOverload]:
    overloads = [getattr(packet, name) for name in packet.overloads()]
    chosen = [o for o in overloads if any("Tensor" in str(argument.type) for argument in o._schema.arguments)]
    return chosen or overloads


def _is_view(overload: OpOverload) -> bool:
    returns = overload._schema.returns
    return bool(returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    )
