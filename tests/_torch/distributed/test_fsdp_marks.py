from __future__ import annotations

from torch import nn

from partita._torch.distributed.fsdp_marks import (
    fsdp_wrapped_name,
    ignored_by_wrappers,
    is_border,
    is_wrapper,
    mark,
    mark_of,
    unwrapped_name,
)


def test_a_mark_is_what_dynamo_reads() -> None:
    module = nn.ReLU()
    assert mark_of(module) is None
    mark(module, use_orig_params=True)
    assert (module._is_fsdp_managed_module, module._fsdp_use_orig_params) == (True, True)
    assert mark_of(module) is True
    mark(module, use_orig_params=False)
    assert mark_of(module) is False


def test_plain_modules_are_no_borders() -> None:
    module = nn.Sequential(nn.ReLU())
    assert not is_wrapper(module)
    assert not is_border(module)
    assert not list(ignored_by_wrappers(module))


def test_wrappers_are_left_out_of_names() -> None:
    assert fsdp_wrapped_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.up") == "layers.0.up"
    assert fsdp_wrapped_name("") == ""


def test_wrappers_around_a_module_are_left_out_of_its_name_and_those_further_out_are_not() -> None:
    assert unwrapped_name("layers.0._orig_mod._checkpoint_wrapped_module") == "layers.0"
    assert unwrapped_name("_orig_mod") == ""
    assert unwrapped_name("_orig_mod.layers.0") == "_orig_mod.layers.0"
