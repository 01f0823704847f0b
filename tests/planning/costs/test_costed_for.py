from __future__ import annotations

import pytest

from partita.errors import PlanError
from partita.planning import CostedFor, get_device


def test_another_device_is_as_fast_as_with_products_of_matrices_of_the_dtype() -> None:
    h100 = CostedFor("H100", "bfloat16", get_device("H100").flops("bfloat16"))
    assert h100.speed_of(get_device("H100")) == 1.0
    assert h100.speed_of(get_device("A100")) == pytest.approx(312 / 989.5)
    in_float32 = CostedFor("H100", "float32", get_device("H100").flops("float32"))
    assert in_float32.speed_of(get_device("A100")) == pytest.approx(19.5 / 67)


def test_no_device_has_no_speed() -> None:
    with pytest.raises(PlanError, match="flops_per_s of device 'mine' is 0"):
        CostedFor("mine", "bfloat16", 0.0)
