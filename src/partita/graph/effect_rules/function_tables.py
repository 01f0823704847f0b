"""Tables of the Python functions and methods whose effects follow from their names."""

from __future__ import annotations

import builtins
import operator
from types import ModuleType
from typing import Any

__all__ = [
    "ALIASING_BUILTINS",
    "ALIASING_METHODS",
    "ALIASING_TORCH",
    "AUGMENTED_ASSIGNMENTS",
    "CONTAINER_METHODS",
    "CONTAINER_OPERATORS",
    "DROPOUT_FUNCTIONALS",
    "INPLACE_OPERATORS",
    "OPERATORS",
    "PURE_BUILTINS",
    "PURE_METHODS",
    "PURE_TORCH",
    "RANDOM_FUNCTIONALS",
    "RANDOM_STATE",
    "WRITING_FUNCTIONALS",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _of(module: ModuleType, names: str) -> frozenset[Any]:
    return frozenset(getattr(module, name) for name in names.split())


OPERATORS = frozenset(
    getattr(operator, name)
    for name in operator.__all__
    if name not in ("attrgetter", "itemgetter", "methodcaller", "call")
)
"""The functions of `operator`, but for those that call what they are given (``methodcaller``, ``call``)."""

AUGMENTED_ASSIGNMENTS = _of(
    operator, "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
)
"""For these torch generates ``a += b``, which also binds the name ``a`` anew."""

INPLACE_OPERATORS = AUGMENTED_ASSIGNMENTS | _of(operator, "iconcat setitem delitem")
"""They change their first operand where it is mutable."""

CONTAINER_OPERATORS = frozenset({operator.add, operator.mul, operator.concat})
"""For two lists they return a list with the same items."""

PURE_BUILTINS = _of(
    builtins,
    "abs all any bool callable complex divmod float format hasattr hash id int isinstance issubclass len "
    "ord pow range repr round str type",
)
ALIASING_BUILTINS = _of(
    builtins, "dict enumerate frozenset getattr list max min reversed set slice sorted sum tuple zip"
)
"""Their results may be, or contain, their operands."""

PURE_TORCH = _names(
    "tensor is_tensor numel is_floating_point is_complex is_nonzero get_default_dtype "
    "get_default_device is_grad_enabled is_autocast_enabled is_inference_mode_enabled "
    "get_autocast_dtype promote_types result_type finfo iinfo typename broadcast_shapes sym_int "
    "sym_float sym_max sym_min sym_not sym_sum sym_ite sym_sqrt can_cast Size device "
    "is_autocast_cache_enabled _backend_from_string lazy_load_decompositions"
)
ALIASING_TORCH = _names(
    "as_tensor asarray from_numpy frombuffer _get_data_attr _add_batch_dim _remove_batch_dim "
    "_wrap_for_grad _unwrap_for_grad"
)
RANDOM_STATE = _names("manual_seed seed initial_seed get_rng_state set_rng_state fork_rng")

RANDOM_FUNCTIONALS = _names(
    "gumbel_softmax fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices"
)
DROPOUT_FUNCTIONALS = dict.fromkeys(
    _names(
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu "
        "multi_head_attention_forward"
    ),
    "training",
)
"""Random functionals, with the flag that switches them on."""
WRITING_FUNCTIONALS = {
    "batch_norm": ("training", ("running_mean", "running_var")),
    "instance_norm": ("use_input_stats", ("running_mean", "running_var")),
    "embedding": ("max_norm", ("weight",)),
    "embedding_bag": ("max_norm", ("input", "weight")),  # it swaps the two where they come in the old order
}
"""Functionals that write operands, with the flag that switches them on."""

PURE_METHODS = _names(
    "dim ndimension nelement numel size stride is_contiguous get_device element_size storage_offset item "
    "tolist __len__ __contains__ __bool__ __int__ __float__ __index__ __hash__ __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ __add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__ __pow__ __matmul__ "
    "__neg__ __abs__ __invert__ __radd__ __rsub__ __rmul__ __rtruediv__ __rdiv__ __rfloordiv__ __rmod__ "
    "__rpow__ __rmatmul__ __rand__ __ror__ __rxor__ __rlshift__ __rrshift__ is_floating_point is_complex "
    "is_shared has_names dim_order new_tensor lower upper startswith endswith index count lu unique "
    "unique_consecutive stft istft"
)
ALIASING_METHODS = _names(
    "float double half bfloat16 int long short bool char byte cfloat cdouble chalf cpu cuda type "
    "numpy data __getitem__ __iter__ __pos__ sum_to_size keys values items get unflatten "
    "refine_names rename align_to copy"
)
CONTAINER_METHODS = _names("append extend insert update setdefault pop popitem clear remove reverse")
"""Methods of a list, dict or set: the first operand changes, and may contain the others afterwards."""
