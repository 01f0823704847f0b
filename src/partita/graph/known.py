"""Tables of Python functions and methods whose effects are known by name."""

from __future__ import annotations

import builtins
import operator

__all__ = [
    "CONTAINER_METHODS",
    "CONTAINER_OPERATORS",
    "DROPOUT_FUNCTIONALS",
    "INPLACE_OPERATORS",
    "OPERATORS",
    "PASSING_BUILTINS",
    "PASSING_METHODS",
    "PASSING_TORCH",
    "PLAIN_BUILTINS",
    "PLAIN_METHODS",
    "PLAIN_TORCH",
    "RANDOM_FUNCTIONALS",
    "RANDOM_STATE",
    "WRITING_FUNCTIONALS",
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OPERATORS = frozenset(
    getattr(operator, name)
    for name in operator.__all__
    if name not in ("attrgetter", "itemgetter", "methodcaller", "call")
)
"""The functions of `operator`, but for those that do what they are told (``methodcaller``, ``call``)."""
INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        _words(
            "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor "
            "setitem delitem"
        )
    )
)
CONTAINER_OPERATORS = frozenset({operator.add, operator.mul, operator.concat})
"""Of two lists they make a list with the same items."""

PLAIN_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        _words(
            "abs all any bool callable complex divmod float format hasattr hash id int isinstance "
            "issubclass len ord pow range repr round str type"
        )
    )
)
PASSING_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in _words(
        "dict enumerate frozenset getattr list max min reversed set slice sorted sum tuple zip"
    )
)
"""These hand on what they were given."""

PLAIN_TORCH = frozenset(
    _words(
        "tensor is_tensor numel is_floating_point is_complex is_nonzero get_default_dtype "
        "get_default_device is_grad_enabled is_autocast_enabled is_inference_mode_enabled "
        "get_autocast_dtype promote_types result_type finfo iinfo typename broadcast_shapes sym_int "
        "sym_float sym_max sym_min sym_not sym_sum sym_ite sym_sqrt can_cast Size device "
        "is_autocast_cache_enabled _backend_from_string lazy_load_decompositions"
    )
)
PASSING_TORCH = frozenset(
    _words(
        "as_tensor asarray from_numpy frombuffer _get_data_attr _add_batch_dim _remove_batch_dim "
        "_wrap_for_grad _unwrap_for_grad"
    )
)
RANDOM_STATE = frozenset(_words("manual_seed seed initial_seed get_rng_state set_rng_state fork_rng"))

RANDOM_FUNCTIONALS = frozenset(
    [
        "gumbel_softmax",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
    ]
)
DROPOUT_FUNCTIONALS = dict.fromkeys(
    _words(
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

PLAIN_METHODS = frozenset(
    _words(
        "dim ndimension nelement numel size stride is_contiguous get_device element_size storage_offset item "
        "tolist __len__ __contains__ __bool__ __int__ __float__ __index__ __hash__ __eq__ __ne__ __lt__ "
        "__le__ __gt__ __ge__ __add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__ __pow__ __matmul__ "
        "__neg__ __abs__ __invert__ __radd__ __rsub__ __rmul__ __rtruediv__ __rdiv__ __rfloordiv__ __rmod__ "
        "__rpow__ __rmatmul__ __rand__ __ror__ __rxor__ __rlshift__ __rrshift__ is_floating_point is_complex "
        "is_shared has_names dim_order new_tensor lower upper startswith endswith index count lu unique "
        "unique_consecutive stft istft"
    )
)
PASSING_METHODS = frozenset(
    _words(
        "float double half bfloat16 int long short bool char byte cfloat cdouble chalf cpu cuda type "
        "numpy data __getitem__ __iter__ __pos__ sum_to_size keys values items get unflatten "
        "refine_names rename align_to copy"
    )
)
CONTAINER_METHODS = frozenset(
    _words("append extend insert update setdefault pop popitem clear remove reverse")
)
"""Of a list or dict: the first operand changes, and may come to hold the others."""
