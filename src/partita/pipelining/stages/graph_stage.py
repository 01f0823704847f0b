"""Stages of a captured model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita._torch.distributed.gradient_sync import converted_dtype
from partita._torch.export.signature import Signature
from partita._torch.tensors.tensor_text import short_name
from partita.errors import SignatureMismatch
from partita.graph.effects import metadata
from partita.pipelining.interface.fixed_dtypes import fixed_dtype
from partita.pipelining.interface.routes import Named, Routes, StageBorder
from partita.pipelining.interface.two_modes import TwoModes, graphs_in
from partita.pipelining.interface.values import accept
from partita.pipelining.stages.flight import Flight
from partita.pipelining.stages.other_ranks import check_ranks_come_in
from partita.pipelining.stages.value_stage import ValueStage
from partita.runtime import Comm

__all__ = ["GraphStage", "named_outputs"]


@final
class GraphStage(ValueStage):
    """A `Stage` around a piece of a model's graph. Made by ``Pipe.build_stage``.

    Attributes:
        signature: how the model's arguments and results are flattened.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        routes: Routes,
        signature: Signature,
        device: torch.device,
        *,
        comm: Comm | None = None,
    ) -> None:
        super().__init__(module, index, routes, device, comm=comm)
        self.signature = signature
        self._processes: tuple[int, ...] = ()

    def accept(self, flat: Sequence[Any], microbatch: int, *, train: bool) -> dict[str, Tensor]:
        """The tensors among the model's flat arguments for one microbatch, by name.

        Raises:
            SignatureMismatch: a shape, dtype or constant that the pipeline was not cut for, or a tensor that
                requires a gradient where the example did not.
        """
        accept(self.routes.inputs, flat, f"microbatch {microbatch}", self.signature)
        tensors = {}
        for expected, value in zip(self.routes.inputs, flat, strict=True):
            if not isinstance(value, Tensor):
                continue
            wants = train and value.requires_grad
            if wants and not getattr(expected, "requires_grad", False):
                raise SignatureMismatch(
                    f"the input {expected.name!r} wants a gradient, but the pipeline was cut with an example "
                    "that does not: detach it, or cut with an example that requires grad"
                )
            tensors[expected.name] = value
        return tensors

    def begin(self, microbatches: int) -> None:
        """See `Stage.begin`.

        Raises:
            SignatureMismatch: ``fully_shard`` computes in another dtype than the stage's graph.
        """
        super().begin(microbatches)
        dtype = None if self._reduction is None else converted_dtype(self.module)
        if dtype is None:
            return
        fixed = fixed_dtype(graphs_in(self._inner))
        if fixed:
            raise SignatureMismatch(
                f"stage {self.index} is sharded with a policy that computes in {short_name(dtype)}, and its "
                f"graph has dtypes of the cut, as {fixed} has: leave param_dtype out, and cut the model and "
                "run the steps under torch.autocast"
            )

    def run_among(self, processes: tuple[int, ...]) -> None:
        """See `Stage.run_among`.

        Raises:
            ExecutionError: the stage's graph has a collective over ranks that run other stages.
        """
        super().run_among(processes)
        if processes != self._processes:
            check_ranks_come_in(graphs_in(self._inner), processes, f"the model's forward, stage {self.index}")
            self._processes = processes

    def _run(self, values: Mapping[str, Any], *, train: bool) -> tuple[Flight, dict[str, Any]]:
        flight, outputs = super()._run(values, train=train)
        if self._has_results:
            self._result = self.results(outputs, self._crossing)
        return flight, outputs

    def results(self, values: Mapping[str, Any], routes: Routes) -> Any:
        """What the model returns, from the values in it by name; ``routes`` have the microbatch's sizes."""
        flat = [values[item.name] if isinstance(item, Named) else item for item in routes.results]
        return (routes.signature or self.signature).unflatten(flat)

    def _missing_gradients(self) -> tuple[bool, ...] | None:
        if not self.is_last or self.loss_fn is None:
            return super()._missing_gradients()
        names = {name: name for name in self._crossing.result_names}
        loss: Any = self.loss_fn(self.results(names, self._crossing))
        return tuple(name != loss for name in self._trained())

    def _trained(self) -> Sequence[str]:
        graph, crossing = self._graph, self._crossing.values
        (values,) = ((),) if graph is None else graph.output_node().args
        nodes: Any = values if isinstance(values, (tuple, list)) else (values,)
        trained = {}
        for node, name in zip(nodes, self.border.outputs, strict=False):
            example = metadata(node)
            is_computed = node.op not in ("placeholder", "get_attr") and isinstance(example, Tensor)
            if is_computed and (
                crossing[name].requires_grad if name in crossing else example.is_floating_point()
            ):
                trained[node] = name
        return tuple(trained.values())

    def _example(self, name: str) -> tuple[Sequence[int], Sequence[int]] | None:
        graph = self._graph
        if graph is None:
            return None
        value = metadata(graph.find_nodes(op="placeholder")[self.border.inputs.index(name)])
        if not isinstance(value, Tensor):
            return None
        layout = tuple(value.shape), tuple(value.stride())
        return layout if all(isinstance(number, int) for numbers in layout for number in numbers) else None

    @property
    def _graph(self) -> Graph | None:
        """Of the present mode; None where the user has put another module in the place of the stage's."""
        module = self._inner.current if isinstance(self._inner, TwoModes) else self._inner
        return module.graph if isinstance(module, GraphModule) else None

    def _arguments(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return inputs, {}

    def _outputs(self, result: Any) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = (result,) if len(self.border.outputs) == 1 else result
        return outputs


def named_outputs(border: StageBorder, result: Any) -> dict[str, Any]:
    """What a stage's module returned, by name."""
    values = (result,) if len(border.outputs) == 1 else result
    return dict(zip(border.outputs, values, strict=True))
