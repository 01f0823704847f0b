"""Forwards that do the same in training and in evaluation (`SAME`), and forwards that do not (`OTHER`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RESULTS: list[Tensor] = []
Forward = Callable[[Any, Tensor], Any]


class Written(nn.Module):
    """Runs the function that it is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.constant = torch.arange(4.0)
        self.calls = 0
        self.cache: dict[int, Tensor] = {}
        self.written = forward
        self.holder = [self]

    def forward(self, x: Tensor) -> Any:
        return self.written(self, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2 + 1


@dataclass
class Found:
    value: Tensor
    scale: int


# ---------------------------------------------------------------------- the same in both modes


def plain(self: Any, x: Tensor) -> Any:
    return self.two(torch.relu(self.one(x)))


def regions(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = x.abs().amax()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.one(x / scale)
    with torch.autocast("cpu", enabled=False):
        return self.two(h.float())


def sizes(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    h = self.one(x).view(n * 2, 2).sum(1).view([n, 2])
    return {"h": h, "n": h.new_full((n, 1), 3.0), "rows": x.shape[1]}


def lists(self: Any, x: Tensor) -> Any:
    parts = list(torch.split(self.one(x), 2, dim=1))
    shape = [2, 2]
    parts.append(parts.pop(0).sum() + self.two.weight[:2, :2].reshape(shape))
    shape.append(1)
    rows = torch.stack([row * 2 for row in self.two.weight])
    largest = rows.max(dim=0)
    return parts, largest.values, [rows]


def state(self: Any, x: Tensor) -> Any:
    self.calls += 1
    if self.calls not in self.cache:
        self.cache[self.calls] = self.one(x)
    self.count.add_(1)
    return Found(self.cache[self.calls] + self.constant, self.calls)


def draws(self: Any, x: Tensor) -> Any:
    return self.one(x) + torch.rand(4) + torch.randn_like(x)


def checkpointed(self: Any, x: Tensor) -> Any:
    if self.training:
        return self.two(checkpoint(self.one, x, use_reentrant=False))
    return self.two(self.one(x))


def unused_regions(self: Any, x: Tensor) -> Any:
    if not self.training:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            pass
    return self.one(x)


SAME = [plain, regions, sizes, lists, draws, unused_regions, checkpointed]

# ----------------------------------------------------------------------------- not the same


def dropout(self: Any, x: Tensor) -> Any:
    return functional.dropout(self.one(x), 0.5, self.training)


def another_weight(self: Any, x: Tensor) -> Any:
    return (self.one if self.training else self.two)(x)


def operands(self: Any, x: Tensor) -> Any:
    a, b = self.one(x), self.two(x)
    return a - b if self.training else b - a


def slices(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h[:, :2] if self.training else h[:, 2:]


def small_constant(self: Any, x: Tensor) -> Any:
    return torch.copysign(self.one(x), torch.full((4,), 0.0 if self.training else -0.0))


def size(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    h = self.one(x)
    return h * 2 if not self.training and n > 4 else h


def size_in_both(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h * x.shape[0] if self.training else h * 3


def grad(self: Any, x: Tensor) -> Any:
    with torch.set_grad_enabled(self.training):
        h = self.one(x)
    return self.two(h)


def inference(self: Any, x: Tensor) -> Any:
    with torch.inference_mode(not self.training):
        h = torch.relu(x * 2)
    return self.two(h.clone())


def cast(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.training):
        return self.one(x).float()


def default_dtype(self: Any, x: Tensor) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if self.training else torch.float32)
    try:
        return self.one(x) + torch.ones(4)
    finally:
        torch.set_default_dtype(before)


def counter(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if self.training:
        self.count.add_(1)
    return h


def write(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if not self.training:
        torch.ops.aten.add_.Scalar(self.count, 2)
    return h


def function(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return Reversed.apply(h) if self.training else h.clone()


def function_in_evaluation(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h.clone() if self.training else Reversed.apply(h)


def script(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h if self.training else scripted(h)


def mapped(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h * 2 if self.training else torch.vmap(torch.sin)(h)


def structure(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return {"h": h} if self.training else (h,)


def number(self: Any, x: Tensor) -> Any:
    return Found(self.one(x), 1 if self.training else 2)


def identity(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return (h, h) if self.training else (h, self.two.weight)


def question(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if not self.training and (x > 0).all():
        h = h * 2
    return h


def answer(self: Any, x: Tensor) -> Any:
    if (x > 0).all():
        return self.one(x) if self.training else self.two(x)
    return self.one(x) * 2


def rows(self: Any, x: Tensor) -> Any:
    order = list(self.two.weight)
    if not self.training:
        order.reverse()
    return self.one(x) + order[0]


def caught(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    try:
        return self.one(h[:, :3]) if not self.training else h.sin()
    except RuntimeError:
        return h.cos()


def swallows(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    try:
        h = h.sin() if self.training else h.cos()
    except BaseException:
        return h
    return h


def mark(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    scale = 3.0 if getattr(h, "seen", False) else 2.0
    h.seen = True
    return h * scale if not self.training else h * 2.0


def root_in_a_closure(self: Any, x: Tensor) -> Any:
    return (lambda h: h * 2 if self.holder[0].training else h * 3)(self.one(x))


def assigned_buffer(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    new = torch.maximum(self.count, h.detach().abs().amax())
    if self.training:
        self.count = new
    return h / new


def mark_in_training(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if self.training:
        h.scale = 2.0
    return h * getattr(h, "scale", 3.0)


def mark_on_a_weight(self: Any, x: Tensor) -> Any:
    if self.training:
        self.one.weight.scale = 2.0
    return self.one(x) * getattr(self.one.weight, "scale", 3.0)


def past_torchs_functions(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if self.training:
        with torch._C.DisableTorchFunction():
            self.count.add_(1)
    return h


def grad_mode_left_off(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if not self.training:
        torch.set_grad_enabled(False)
    return h


def global_result(self: Any, x: Tensor) -> Any:
    RESULTS.clear()
    RESULTS.append(self.one(x))
    RESULTS.append(functional.dropout(RESULTS[0], 0.1, self.training))
    return RESULTS


def condition(self: Any, x: Tensor) -> Any:
    return torch.cond(self.one(x).sum() > 0, torch.sin, torch.cos, (Reversed.apply(x),))


OTHER = [
    root_in_a_closure,
    assigned_buffer,
    mark_in_training,
    mark_on_a_weight,
    past_torchs_functions,
    grad_mode_left_off,
    global_result,
    condition,
    dropout,
    another_weight,
    operands,
    slices,
    small_constant,
    size,
    size_in_both,
    grad,
    inference,
    cast,
    default_dtype,
    counter,
    write,
    function,
    function_in_evaluation,
    script,
    mapped,
    structure,
    number,
    identity,
    question,
    answer,
    rows,
    caught,
    swallows,
    mark,
]
