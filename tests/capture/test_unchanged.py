from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.capture import capture
from partita.capture.unchanged import unchanged
from partita.errors import CaptureError


class Keeps(nn.Module):
    """Keeps things from its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.calls, self.log, self.memo, self.seen = 0, [], {"old": 1}, {3}
        self.last: Tensor | None = None


class Remembers(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.a(x)
        self.log.append(self.last)
        self.seen.add(4)
        if "table" not in self.memo:
            self.memo["table"] = torch.arange(4.0)
        return self.last + self.memo["table"]


class Registers(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.scale = nn.Parameter(torch.ones(4))
        return self.a(x) * self.scale


class Fails(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        self.calls += 1
        if self.a(x).sum().item() > 0:
            return x
        return -x


def _kept(model: Keeps) -> dict[str, Any]:
    return {
        "attributes": {name: value for name, value in vars(model).items() if name not in ("_modules", "a")},
        "log": list(model.log),
        "memo": dict(model.memo),
        "seen": set(model.seen),
        "parameters": list(dict(model.named_parameters())),
    }


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("kind", [Remembers, Registers])
def test_a_capture_leaves_nothing_in_the_model_and_can_be_repeated(kind: type[Keeps]) -> None:
    model, x = kind(), torch.randn(2, 4)
    before = _kept(model)
    graphs = [capture(model, (x,)).module for _ in range(2)]
    assert _kept(model) == before
    for graph in graphs:
        assert torch.equal(graph(x), model(x))


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
def test_a_capture_that_fails_leaves_nothing_either() -> None:
    model, x = Fails(), torch.randn(2, 4)
    before = _kept(model)
    for _ in range(2):
        with pytest.raises(
            CaptureError,
            match=r"at if self\.a\(x\)\.sum\(\)\.item\(\) > 0:  # .*test_unchanged\.py:\d+ in forward",
        ):
            capture(model, (x,))
        assert _kept(model) == before


def test_containers_are_the_same_objects_with_their_contents_back() -> None:
    model = Remembers()
    log = model.log
    with unchanged(model):
        model.log.append(1)
        model.log = [7]
        model.new = 3
    assert model.log is log
    assert log == []
    assert not hasattr(model, "new")
