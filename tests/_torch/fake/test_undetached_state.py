from __future__ import annotations

from typing import Any

from torch import nn

from partita._torch.fake.undetached_state import tensors_in_state_dict
from partita._torch.modules.state_dicts import add_versions


def test_tensors_in_a_state_dict_are_the_modules_own() -> None:
    class Own(nn.Linear):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {**super().state_dict(), "first": self.weight.detach()[0], "epoch": 3}

    module = Own(2, 2)
    state = tensors_in_state_dict(module)
    assert state["weight"] is module.weight
    assert state["first"].shape == (2,)
    assert state["epoch"] == 3


def test_a_part_of_a_larger_module_writes_into_its_dict() -> None:
    class Own(nn.BatchNorm1d):
        def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
            return {"other": super().state_dict(**options)}

    state = tensors_in_state_dict(Own(2), "part.", nested=True)
    assert next(iter(state)) == "part.weight"
    larger = nn.Linear(2, 2).state_dict()
    add_versions(larger, state)
    assert larger._metadata.keys() == {"", "part"}  # type: ignore[attr-defined]
    add_versions({}, state)
