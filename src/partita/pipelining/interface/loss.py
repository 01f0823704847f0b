"""The loss as a part of the model: wrappers that compute it, and its place among the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from partita.errors import ArgumentError, ExecutionError, NotSupported

__all__ = ["LossSpec", "LossWrapper", "OutputLoss", "TrivialLossWrapper", "checked_loss", "loss_by_name"]

LossSpec = bool | tuple[Any, ...] | list[Any] | dict[str, Any]
"""A tree like the model's output in which one leaf is True: the loss."""


class LossWrapper(nn.Module):
    """A model and its loss function as one module; subclasses say in ``forward`` how they are connected.

    >>> class Regression(LossWrapper):
    ...     def forward(self, x, targets):
    ...         prediction = self.module(x)
    ...         return {"loss": self.loss_fn(prediction, targets), "prediction": prediction}
    >>> model = Regression(nn.Linear(2, 1), nn.MSELoss())  # loss_spec={"loss": True, "prediction": False}
    """

    loss_spec: ClassVar[LossSpec | None] = None
    """The ``loss_spec`` for `pipeline`, where the class determines it."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Compute the loss; subclasses override this."""
        raise NotSupported(
            f"{type(self).__name__} has no forward: write one that runs self.module, then self.loss_fn, and "
            "returns the loss; or take TrivialLossWrapper"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``: the output is the loss."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """Return the loss of one batch."""
        return self.loss_fn(self.module(x), targets)


class OutputLoss:
    """Picks the loss out of what the model returns. Can be given as a schedule's ``loss_fn``.

    Args:
        spec: see `LossSpec`.
        output: a tree like the model's output.
        leaf: the type of a leaf that can be the loss.

    Raises:
        ArgumentError: the tree does not fit the output, or does not mark exactly one tensor.

    >>> OutputLoss((False, True), ("prediction", "loss"), str)(("prediction", 3.0))
    3.0
    """

    def __init__(self, spec: LossSpec, output: Any, leaf: type) -> None:
        paths = list(_marked(spec, output, leaf, ()))
        if len(paths) != 1:
            raise ArgumentError(
                f"the loss_spec {spec!r} marks {len(paths)} outputs as the loss: mark exactly one with True"
            )
        self.spec = spec
        self.path: tuple[Any, ...] = paths[0]

    def __call__(self, output: Any, target: Any = None) -> Any:  # noqa: ARG002 - as a loss_fn is called
        """Return the loss. ``target`` is ignored: the model has it among its inputs."""
        for key in self.path:
            output = output[key]
        return output

    def is_in(self, output: Any) -> bool:
        """Whether the output has a loss: one without labels has none."""
        try:
            loss = self(output)
        except (LookupError, TypeError):
            return False
        return isinstance(loss, Tensor) and loss.dim() == 0


def loss_by_name(output: Any, trains: Callable[[Any], bool]) -> OutputLoss | None:
    """Return the `OutputLoss` of a dict's value under ``"loss"``, where gradients can start from that.

    Args:
        output: a tree like the model's output.
        trains: whether a leaf is a tensor of one number that depends on trained parameters.
    """
    if not isinstance(output, Mapping) or "loss" not in output or not trains(output["loss"]):
        return None
    return OutputLoss({key: key == "loss" for key in output}, output, type(output["loss"]))


def checked_loss(loss: Any) -> Tensor:
    """Return ``loss`` if gradients can start from it.

    Raises:
        ExecutionError: it is no tensor of one number, or depends on no parameter that is trained.
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        actual = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ExecutionError(
            f"the output that the loss_spec marks has {actual}: a loss is a tensor of one number, such as a "
            "mean()"
        )
    if not loss.requires_grad:
        raise ExecutionError(
            "the loss does not depend on any parameter that is trained: unfreeze one, or call the pipe under "
            "torch.no_grad()"
        )
    return loss


def _marked(spec: Any, output: Any, leaf: type, path: tuple[Any, ...]) -> Any:
    """The paths to the leaves that are marked."""
    where = "".join(f"[{key!r}]" for key in path) or "the output"
    if spec is False:
        return
    if spec is True:
        if not isinstance(output, leaf):
            raise ArgumentError(
                f"the loss_spec marks {where} as the loss, which is a {type(output).__name__} and no tensor"
            )
        yield path
    elif isinstance(spec, Mapping):
        if not isinstance(output, Mapping) or output.keys() != spec.keys():
            actual = f"keys {list(output)}" if isinstance(output, Mapping) else f"a {type(output).__name__}"
            raise ArgumentError(
                f"the loss_spec has keys {list(spec)} for {where}, which has {actual}: give the same keys"
            )
        for key, item in spec.items():
            yield from _marked(item, output[key], leaf, (*path, key))
    elif isinstance(spec, (tuple, list)):
        if not isinstance(output, (tuple, list)) or len(output) != len(spec):
            actual = f"{len(output)}" if isinstance(output, (tuple, list)) else f"a {type(output).__name__}"
            raise ArgumentError(
                f"the loss_spec has {len(spec)} items for {where}, which has {actual}: give one for each"
            )
        for number, item in enumerate(spec):
            yield from _marked(item, output[number], leaf, (*path, number))
    else:
        raise ArgumentError(
            f"the loss_spec has a {type(spec).__name__} for {where}: it is made of bools, tuples, lists and "
            "dicts"
        )
