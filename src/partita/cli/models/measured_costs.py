"""The costs of a model that was named: measured here, or worked out for a device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import torch

from partita._torch.containers.pytree import flatten
from partita._torch.tensors.tensor_text import dtype_and_shape
from partita.capture.proving.proof import without_values
from partita.cli.models.model_source import ModelSource
from partita.cli.models.user_file import Built
from partita.errors import InfeasiblePlan, UsageError
from partita.pipelining import measure_units
from partita.pipelining.measuring.costed_for import most_common_dtype
from partita.planning import CostModel, Device
from partita.reporting import format_count

__all__ = ["MeasuredCosts", "measure_costs"]


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs of a model, and what they are for.

    Attributes:
        costs: of its units.
        dtype: of most of its parameters; None where it has none.
        microbatch: the tensors that it is given, in words.
    """

    costs: CostModel
    dtype: str | None
    microbatch: str

    @classmethod
    def of(cls, built: Built, costs: CostModel) -> MeasuredCosts:
        """Those of a model that has been costed; what its inputs leave unused is told on standard error."""
        _tell_unused_parameters(built, costs)
        named = [(f"argument {place}", value) for place, value in enumerate(built.args)]
        tensors = [
            f"{name} {dtype_and_shape(leaf.dtype, leaf.shape)}"
            for name, value in (*named, *built.kwargs.items())
            for leaf in flatten(value)[0]
            if isinstance(leaf, torch.Tensor)
        ]
        return cls(costs, most_common_dtype(built.model.parameters()), ", ".join(tensors))


def measure_costs(
    source: ModelSource,
    device: Device | None,
    ranks: int,
    stages: int | None,
    progress: Callable[[float], None],
) -> MeasuredCosts:
    """Make the model and cost its units: worked out for a device, without memory, or measured here.

    Args:
        source: the model.
        device: what to work the costs out for; None to measure on this machine.
        ranks: how many are planned for; measured here, each is a process with one thread, as torchrun starts
            them, unless ``OMP_NUM_THREADS`` says another number.
        stages: how many are wanted; None: one a rank at least. Smaller units are taken where it needs them.
        progress: called with the share that is done.

    Raises:
        UsageError: as `ModelSource.build`, or what is to be measured here has no values.
        InfeasiblePlan: the model can't be cut into so many stages.
    """
    if stages is None:
        try:
            return measure_costs(source, device, ranks, ranks, progress)
        except InfeasiblePlan as error:
            raise InfeasiblePlan(
                f"{ranks} ranks take {ranks} stages at least, but {error.reason}: take fewer ranks"
            ) from error
    with redirect_stdout(sys.stderr):  # what the model prints is no part of the plan
        if device is None:
            built = source.build("cuda" if torch.cuda.is_available() else "cpu")
            if reason := without_values(built.model, built.args, built.kwargs):
                raise UsageError(
                    f"{source.title} can't be measured here: {reason}: make it with values, or give --devices"
                )
            with _threads_of_a_rank(ranks):
                costs = measure_units(built.model, built.args, built.kwargs, stages=stages, progress=progress)
            return MeasuredCosts.of(built, costs)
        built = source.build("meta")
        # Nothing can be proven without numbers, and one size of the batch is all that costs are for.
        costs = measure_units(
            built.model,
            built.args,
            built.kwargs,
            stages=stages,
            device=device,
            progress=progress,
            prove=False,
            dynamic_shapes=False,
        )
    return MeasuredCosts.of(built, costs)


def _tell_unused_parameters(built: Built, costs: CostModel) -> None:
    """Say on standard error where the example leaves parameters unused, such as those of the vision tower
    of a model that is given tokens alone: they are not in the costs.
    """
    count = sum(parameter.numel() for parameter in built.model.parameters())
    unused = count - costs.parameters(0, len(costs.units) - 1)
    if unused <= 0:
        return
    inputs = ", ".join(built.kwargs) if built.kwargs and not built.args else "these inputs"
    print(
        f"{format_count(unused)} of {format_count(count)} parameters are not in the plan: forward does not "
        f"use them with {inputs}. To plan for all inputs, write a function that returns (model, args, "
        "kwargs) with them, and name it as FILE.py:NAME",
        file=sys.stderr,
    )


@contextmanager
def _threads_of_a_rank(ranks: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
