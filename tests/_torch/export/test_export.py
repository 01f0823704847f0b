from __future__ import annotations

import logging
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from partita._torch.export.export import Way, export_module
from partita._torch.export.open_sizes import open_batch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.hidden + torch.tensor([1.0, 2.0])


def test_the_module_holds_the_models_own_state_and_nothing_else_in_its_state_dict() -> None:
    model, x = Model(), torch.randn(3, 2)
    module = export_module(model, (x,), {}, way="eager")
    assert module.get_parameter("layer.weight") is model.layer.weight
    assert module.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in module.named_buffers()] == ["hidden"]
    assert not module._forward_pre_hooks
    module.eval()
    assert not module.training


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.layer(x)
            with torch.no_grad():
                scale = self.layer(x)
        return h.float() + scale.float()


@pytest.mark.parametrize("strict", [False, True])
def test_regions_stay_flat_and_none_is_lost(strict: bool) -> None:
    module = export_module(Regions(), (torch.randn(3, 2),), {}, way="strict" if strict else "eager")
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert targets.count(torch._C._set_grad_enabled) == 2
    assert targets.count(torch.amp.autocast_mode._enter_autocast) == 1
    assert not [target for target in targets if isinstance(target, torch._ops.HigherOrderOperator)]


def test_torchs_own_export_loses_a_no_grad_region_within_autocast_and_is_as_before_afterwards() -> None:
    model, x = Regions(), torch.randn(3, 2)
    export_module(model, (x,), {}, way="eager")
    code = torch.export.export(model, (x,)).graph_module.print_readable(print_output=False)
    assert "wrap_with_autocast" in code
    assert "wrap_with_set_grad_enabled" not in code


@pytest.mark.parametrize("strict", [False, True])
def test_a_region_of_inference_mode_is_one_without_gradients_where_torchs_own_export_leaves_none(
    strict: bool,
) -> None:
    class Inference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                fixed = self.b(x)
            return self.a(x) + fixed.clone()

    model, x = Inference(), torch.randn(3, 2)
    torch.export.export(model, (x,), strict=strict).module()(x).sum().backward()
    assert model.b.weight.grad is not None
    model.zero_grad()
    export_module(model, (x,), {}, way="strict" if strict else "eager")(x).sum().backward()
    assert model.b.weight.grad is None
    assert model.a.weight.grad is not None
    assert torch._C._InferenceMode.__module__ == "torch._C"


class Catching(nn.Module):
    """Hands on what it is given, as adapters around a model do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, *args: torch.Tensor, scale: float = 1.0, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.inner(kwargs["x"] + args[0]) * kwargs["mask"] * scale  # type: ignore[no-any-return]


OPEN = {0: torch.export.Dim.AUTO}


@pytest.mark.parametrize("spelled_out", [False, True])
def test_sizes_stay_open_in_what_goes_into_a_models_kwargs(spelled_out: bool) -> None:
    def arguments(batch: int) -> tuple[tuple[Tensor], dict[str, Any]]:
        x, y, mask = torch.randn(3, batch, 4)
        return (y,), {"mask": mask, "scale": 2.0, "x": x}

    model, (args, kwargs) = Catching(), arguments(2)
    shapes: Any = open_batch([*args, kwargs["mask"], kwargs["x"]])
    if spelled_out:
        shapes = {"args": (OPEN,), "kwargs": {"mask": OPEN, "x": OPEN}, "scale": None}
    # torch counted what is in kwargs twice
    mended = TorchVersion(torch.__version__) >= "2.14"
    with nullcontext() if mended else pytest.raises(AssertionError, match="tree_name"):
        torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    module = export_module(model, args, kwargs, way="eager", dynamic_shapes=shapes)
    more, named = arguments(5)
    assert torch.equal(module(*more, **named), model(*more, **named))
    assert vars(model).keys() == vars(Catching()).keys()


def test_warnings_of_torch_about_the_trace_are_neither_shown_nor_errors() -> None:
    x = torch.randn(2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = export_module(nn.LSTM(4, 4, batch_first=True), (x,), {}, way="eager")
    assert isinstance(module, torch.fx.GraphModule)


class Warns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("of the model's own", stacklevel=1)
        return x


def test_a_models_own_warning_is_shown() -> None:
    with pytest.warns(UserWarning, match="of the model's own"):
        export_module(Warns(), (torch.ones(2),), {}, way="eager")


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.mm(x, x)


def test_torch_does_not_log_the_stack_of_an_operator_that_can_not_be_traced() -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError):
            export_module(Untraceable(), (torch.randn(2, 3),), {}, way="eager")
    finally:
        log.removeHandler(handler)
    assert not seen


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() < 4:
            x = x + 1
        return x[: int(x.sum().long())]


@pytest.mark.parametrize("way", ["eager", "strict"])
def test_torch_prints_no_graph_of_what_it_could_not_trace(
    way: Way, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        torch.export.export(Counting(), (torch.ones(2),), strict=way == "strict")
    assert "def forward(self" in capfd.readouterr().err  # torch does
    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        export_module(Counting(), (torch.ones(2),), {}, way=way)
    assert capfd.readouterr().err == ""


class Adapting(nn.Module):
    """Test-time training: the gradient of a loss of each sample, in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        def loss(weight: Tensor, key: Tensor, sample: Tensor) -> Tensor:
            return (key @ weight - sample).square().mean()

        keys = self.keys(x)
        step = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(self.weight, keys, x)
        return x + keys @ (self.weight - 0.1 * step)


@pytest.mark.parametrize("way", ["eager", "strict"])
def test_no_transform_is_left_open_by_a_trace_that_fails(way: Way) -> None:
    model, x = Adapting(), torch.randn(2, 3, 4)
    with pytest.raises(Exception, match=r"constant|functorch|FakeTensor"):  # whatever torch makes of it
        export_module(model, (x,), {}, way=way)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert nn.Linear(2, 2).weight.shape == (2, 2), "vmap refuses random calls"
    with torch.autograd.graph.save_on_cpu():  # which grad refuses
        model.keys(x).sum().backward()
    assert model.keys.weight.grad is not None
