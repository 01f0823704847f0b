from __future__ import annotations

import pytest
import torch

from partita._torch.autograd import global_settings as ambient


def test_what_a_block_leaks_is_put_back_also_when_it_raises() -> None:
    before = ambient.capture()
    leaked = []

    def leak() -> None:
        leaked.append(torch.inference_mode())
        leaked[-1].__enter__()
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        raise KeyError("on purpose")

    with pytest.raises(KeyError), ambient.preserved():
        leak()
    assert ambient.capture() == before
    leaked.clear()
    assert ambient.capture() == before


def test_no_mode_is_left_where_there_was_no_default_device() -> None:
    with ambient.preserved():
        torch.set_default_device("meta")
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_block_runs_under_the_settings_in_force(mode: type) -> None:
    with mode():
        before = ambient.capture()
        with ambient.preserved():
            assert ambient.capture() == before
        assert ambient.capture() == before
