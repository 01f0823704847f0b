from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.capture import capture
from partita.capture.tracing.unchanged import rehearsal, unchanged
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


class Frozen(dict[str, Any]):
    """A configuration that can't be changed by mistake, such as diffusers' models have."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this configuration is frozen")

    update = setdefault = pop = __setitem__ = __delitem__ = _refuse


class FrozenOrder(OrderedDict[str, Any]):
    update = setdefault = pop = __delitem__ = Frozen._refuse


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config, self.order = Frozen(width=4, depth=2), FrozenOrder([("b", 1), ("a", 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) * self.config["depth"]


def test_a_dict_that_refuses_to_be_changed_keeps_its_items() -> None:
    model, x = Configured(), torch.randn(2, 4)
    graph = capture(model, (x,)).module
    assert model.config == {"width": 4, "depth": 2}
    assert list(model.order.items()) == [("b", 1), ("a", 2)]
    assert torch.equal(graph(x), model(x))


def test_what_was_changed_past_a_refusing_class_is_put_back_in_order() -> None:
    model = Configured()
    with unchanged(model):
        dict.clear(model.config)
        OrderedDict.move_to_end(model.order, "b")
        dict.__setitem__(model.config, "depth", 3)
    assert list(model.config.items()) == [("width", 4), ("depth", 2)]
    assert list(model.order.items()) == [("b", 1), ("a", 2)]
    assert list(reversed(model.order)) == ["a", "b"]


class Log:
    def __init__(self) -> None:
        self.last: Any = None
        self.lines: deque[Any] = deque(maxlen=2)


def test_containers_in_containers_and_in_objects_are_put_back() -> None:
    model = nn.Linear(2, 2)
    model.log, model.rows = Log(), ({"a": [1, {2}]},)  # type: ignore[assignment]
    log: Any = model.log
    inner: Any = model.rows[0]["a"]
    log.lines.extend((1, 2))
    with unchanged(model):
        log.last = 5
        log.lines.append(3)
        inner[1].add(7)
        inner.append(9)
        del model.rows[0]["a"]
    assert (log.last, list(log.lines), log.lines.maxlen) == (None, [1, 2], 2)
    assert model.rows[0] == {"a": [1, {2}]}
    assert model.rows[0]["a"] is inner


@pytest.mark.parametrize("parameters", [False, True])
def test_parameters_with_other_data_get_their_own_again(parameters: bool) -> None:
    model = nn.Linear(2, 2)
    place, elements = model.weight.data_ptr(), model.weight.detach().clone()
    with rehearsal(model, parameters=parameters):
        if parameters:
            model.weight.data.zero_()
        model.weight.data = torch.ones(2, 2)
    assert model.weight.data_ptr() == place
    assert torch.equal(model.weight, elements)
