"""Tensors that wrap others are saved as what they are made of, in a model and in an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map_only

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.contents.wrapped_tensors import (
    as_dicts,
    as_tensors,
    description,
    is_wrapper,
)
from partita.pipelining.checkpoints.pretrained.export_pretrained import export_pretrained
from partita.pipelining.checkpoints.snapshots import Snapshots
from partita.runtime import Comm, InProcessWorld

aten = torch.ops.aten


class Quantised(Tensor):
    """Bytes and a scale, which reads as ``(codes - zero) * scale``."""

    codes: Tensor
    scale: Tensor
    zero: int

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, zero: int) -> Quantised:
        wrapper = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        wrapper.codes, wrapper.scale, wrapper.zero = codes, scale, zero
        return cast("Quantised", wrapper)

    @classmethod
    def of(cls, values: Tensor, zero: int = 0) -> Quantised:
        scale = values.abs().max() / 100
        return cls(((values / scale).round() + zero).to(torch.float8_e4m3fn), scale, zero)

    def read(self) -> Tensor:
        return (self.codes.float() - self.zero) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["codes", "scale"], self.zero

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], zero: int, *_: Any) -> Quantised:
        return cls(parts["codes"], parts["scale"], zero)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return cls(func(args[0].codes), func(args[0].scale), args[0].zero)
        if func is aten.view.default:
            return cls(func(args[0].codes, args[1]), args[0].scale, args[0].zero)
        if func is aten.copy_.default and isinstance(args[0], Quantised):
            values = cls.of(args[1].read() if isinstance(args[1], Quantised) else args[1])
            args[0].codes.copy_(values.codes)
            args[0].scale.copy_(values.scale)
            return args[0]
        return func(*tree_map_only(Quantised, Quantised.read, args), **(kwargs or {}))


class QuantisedMomentum(Optimizer):
    """Momentum whose state wraps others, alone and in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            before = state.get("momentum", Quantised.of(torch.ones_like(parameter)))
            momentum = before.read() * 0.9 + parameter.grad
            state["momentum"] = Quantised.of(momentum)
            state["past"] = [Quantised.of(momentum, zero=1), before.read(), [{"first": before}]]
            parameter.data.sub_(momentum * 0.1)


class Layer(nn.Module):
    """Trained beside a weight that is not."""

    def __init__(self, seed: int, zero: int = 0) -> None:
        super().__init__()
        values = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
        self.trained = nn.Parameter(values.clone())
        self.weight = nn.Parameter(Quantised.of(values, zero), requires_grad=False)
        self.tied = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.trained + x @ cast("Quantised", self.weight).read()


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal, and tensors of one class made of equal parts."""
    if isinstance(left, Quantised):
        parts = torch.equal(left.codes.view(torch.uint8), right.codes.view(torch.uint8))
        return (
            type(right) is Quantised and parts and same(left.scale, right.scale) and left.zero == right.zero
        )
    if isinstance(left, Tensor):
        return type(left) is type(right) and torch.equal(left, right)
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.full((2, 3), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    model = Layer(0)
    optimizer = QuantisedMomentum([model.trained])
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, model, optimizer)
    other = Layer(1)
    again = QuantisedMomentum([other.trained])
    load_checkpoint(tmp_path, other, again)
    assert same(again.state[other.trained], optimizer.state[model.trained])
    assert same(other.weight.detach(), model.weight.detach())
    assert other.tied is other.weight
    train(model, optimizer, 2)
    train(other, again, 2)
    assert torch.equal(model.trained, other.trained)


def test_snapshots_and_ranks_that_have_copies_keep_them_too(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        model = Layer(0)
        optimizer = QuantisedMomentum([model.trained])
        train(model, optimizer, 1)
        save_checkpoint(tmp_path / "copies", model, optimizer)

    InProcessWorld(1).run(body)
    model = Layer(0)
    optimizer = QuantisedMomentum([model.trained])
    train(model, optimizer, 1)
    with Snapshots(tmp_path / "snapshots", every=1, keep=1) as snapshots:
        snapshots.save(1, model, optimizer)
        train(model, optimizer, 1)
    for folder in (tmp_path / "copies", tmp_path / "snapshots" / "step-000000001"):
        other = Layer(1)
        again = QuantisedMomentum([other.trained])
        load_checkpoint(folder, other, again)
        train(other, again, 1)
        assert same(again.state[other.trained], optimizer.state[model.trained])
        assert torch.equal(model.trained, other.trained)
        assert same(other.weight.detach(), model.weight.detach())


def test_another_kind_of_tensor_than_was_saved_is_an_error(tmp_path: Path) -> None:
    ordinary = Layer(0)
    ordinary.weight = ordinary.tied = nn.Parameter(torch.ones(3, 3))
    save_checkpoint(tmp_path / "wrapped", Layer(0))
    save_checkpoint(tmp_path / "ordinary", ordinary)
    other = Layer(0, zero=1)
    cases: tuple[tuple[str, Layer, str], ...] = (
        (
            "wrapped",
            ordinary,
            r" is .*:Quantised torch.float32 \[3, 3\] 0 \(codes: torch.float8_e4m3fn, scale: torch.float32\) "
            r"in .*, and an ordinary tensor here",
        ),
        ("ordinary", other, r" is an ordinary tensor in .*, and .*:Quantised torch.float32 .* here: load it"),
        (
            "wrapped",
            other,
            r" is .*\] 0 .* in .*, and .*\] 1 .* here: load it into the model as it was saved",
        ),
    )
    for folder, model, message in cases:
        with pytest.raises(CheckpointError, match=r"^'model\.(tied|weight)'" + message):
            load_checkpoint(tmp_path / folder, model)


def test_parts_are_never_cast_nor_left_out(tmp_path: Path) -> None:
    """Codes of 200 were -56 after ``cast=True``; after ``strict=False`` a weight had the codes of the
    checkpoint and its own scale.
    """

    class OnlyCodes(Quantised):
        def __tensor_flatten__(self) -> tuple[list[str], int]:
            return ["codes"], self.zero

    OnlyCodes.__qualname__ = Quantised.__qualname__
    bytes_ = Quantised(torch.full((3, 3), 200, dtype=torch.uint8), torch.ones(()), 0)
    for number, weight in enumerate((bytes_, OnlyCodes.of(torch.ones(3, 3)))):
        saved, other = Layer(0), Layer(1)
        saved.weight = saved.tied = nn.Parameter(weight, requires_grad=False)
        save_checkpoint(tmp_path / str(number), saved)
        before = cast("Quantised", other.weight).read()
        with pytest.raises(CheckpointError, match=r"\(codes: .*\) in .* \(codes: .*\) here: load it into"):
            load_checkpoint(tmp_path / str(number), other, cast=True, strict=False)
        assert torch.equal(cast("Quantised", other.weight).read(), before)


def test_what_a_tensor_wraps_with_is_compared_by_value() -> None:
    """An object of no text of its own was equal to any other of its class, and a set had another order in
    each process.
    """

    class Zero:
        def __init__(self, zero: int) -> None:
            self.zero = zero

    def text(context: Any) -> str:
        return description(Quantised(torch.ones(2), torch.ones(()), context))

    assert text(Zero(1)) == text(Zero(1)) != text(Zero(2))
    assert text([(Zero(1),)]) != text([(Zero(2),)])
    assert " {'a', 'b', 'c'} (" in text({"c", "b", "a"})
    assert text({"how": (1, None), "by": [2]}).count(" {'how': (1, None), 'by': [2]} (") == 1
    ragged = [torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged) for _ in range(2)]
    assert description(ragged[0]) == description(ragged[1])


def test_a_weight_may_have_the_name_of_the_text(tmp_path: Path) -> None:
    """A checkpoint with a weight ``it.wrapper`` was said to be damaged."""
    saved, model = nn.Module(), nn.Module()
    saved.it = nn.Module()
    saved.it.wrapper = nn.Parameter(torch.ones(2))
    model.it = nn.Parameter(torch.ones(2))
    save_checkpoint(tmp_path, saved)
    with pytest.raises(CheckpointError, match=r"does not have 'model\.it': load what was saved from this"):
        load_checkpoint(tmp_path, model)


def test_an_export_has_no_place_for_them(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "saved", Layer(0))
    with pytest.raises(
        CheckpointError, match=r"^'(tied|weight)'.* wrap other tensors \(quantised weights do\)"
    ):
        export_pretrained(tmp_path / "saved", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_class_that_is_not_imported_is_not_imported_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layer(0)
    optimizer = QuantisedMomentum([model.trained])
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer)
    monkeypatch.delitem(sys.modules, __name__)
    message = r"the optimizer's 'momentum' is a .*\.Quantised, which this process has not imported: make the"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, model, SGD([model.trained], lr=0.1))


def test_a_file_names_classes_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports what it is asked for (as transformers does) was asked for what a file named."""
    lazy = ModuleType("lazy")
    asked: list[str] = []
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    parts = as_dicts(Quantised.of(torch.ones(2)), "it")
    for name in ("lazy:Kind", "lazy:Kind.inner", ":", "torch:", 3, "torch:Tensor"):
        with pytest.raises(CheckpointError, match=r"^it is a .*, which this process has not imported: make"):
            as_tensors({**parts, "partita.wrapper": name}, "it")
    assert not asked


@pytest.mark.parametrize(
    "damage",
    [
        {"tensors": {}},
        {"tensors": [1]},
        {"tensors": {"codes": "text", "scale": 1}},
        {"size": "text"},
        {"size": (4, 4)},
        {"partita.wrapper": "torch.distributed.tensor:DTensor"},
    ],
)
def test_other_parts_than_the_class_takes_are_an_error(damage: dict[str, Any]) -> None:
    parts = as_dicts(Quantised.of(torch.ones(2, 2)), "it") | damage
    with pytest.raises(
        CheckpointError, match=r"^it can't be made a \w+ of what was saved \(.*: load with the"
    ):
        as_tensors(parts, "it")


def test_a_class_that_would_not_be_found_is_not_saved() -> None:
    class Local(Quantised):
        pass

    with pytest.raises(
        CheckpointError, match=r"Local, and loading would not find the class by this name: def"
    ):
        as_dicts(Local.of(torch.ones(2)), "it")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_shards_that_wrap_others_are_refused(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    shard = Quantised.of(torch.ones(2, 2))
    sharded = DTensor.from_local(shard, mesh, [Shard(0)], shape=shard.shape, stride=shard.stride())
    with pytest.raises(CheckpointError, match=r"^exp_avg is in shards, each a Quantised, whose parts can't"):
        as_dicts([sharded], "exp_avg")
    model = nn.Module()
    model.weight = nn.Parameter(sharded, requires_grad=False)
    with pytest.raises(CheckpointError, match=r"'weight' is in shards, each a .* shard the model after load"):
        save_checkpoint(tmp_path, model)
    parts = as_dicts(shard, "exp_avg")
    parts["tensors"]["codes"] = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    with pytest.raises(CheckpointError, match=r"whose parts can't be put into shards, but its parameter is"):
        as_tensors(parts, "exp_avg")


def test_wrappers_of_wrappers() -> None:
    inner = Quantised.of(torch.ones(2, 2), zero=3)
    outer = Quantised(cast("Tensor", inner), torch.ones(()), zero=4)
    back = as_tensors(as_dicts(outer, "it"), "it")
    assert is_wrapper(back)
    assert back.zero == 4
    assert same(back.codes, inner)
