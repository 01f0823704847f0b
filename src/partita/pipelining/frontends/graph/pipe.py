"""A model cut into stages: runs locally like the model, and hands out stages for ranks to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.export.export import Signature
from partita._torch.fake.shapes import fake_values
from partita._torch.graph_module.graph_copy import copy_graph
from partita.capture.proof import UNASKED, Proof
from partita.capture.sizes import Sizes
from partita.errors import CaptureError, StageIndexError
from partita.graph.effects import metadata
from partita.pipelining.frontends.graph.coverage import check_operations, unused_state
from partita.pipelining.frontends.graph.state_names import add_aliases, add_unused
from partita.pipelining.frontends.graph.writes import reused_outputs, written_inputs
from partita.pipelining.interface.loss import LossSpec, OutputLoss, checked_loss, loss_by_name
from partita.pipelining.interface.model_structure import structure_of
from partita.pipelining.interface.pipe_info import PipeInfo
from partita.pipelining.interface.routes import Named, Routes, StageBorder, accept, make_routes
from partita.pipelining.interface.two_modes import ModeCut, graphs_in, joined
from partita.pipelining.stages.build import build_stage
from partita.pipelining.stages.flight import detached
from partita.pipelining.stages.relocate import devices_of
from partita.pipelining.stages.stage import Stage
from partita.pipelining.tied.tied import tied_parameters
from partita.pipelining.training.reference import graph_inputs
from partita.planning import Plan
from partita.runtime import Comm
from partita.splitter import Piece, Split

__all__ = ["Pipe"]


class Pipe(nn.Module):
    """What `pipeline` returns.

    Calling it runs the stages one after the other in this process, with the model's own signature, output
    structure, autograd and random numbers. The parameters are the model's own.

    With a ``loss_spec`` it contains its backward: a call also fills the gradients (where grad mode is on),
    and what it returns has no history. Its stages' schedules need no ``loss_fn`` then.

    Attributes:
        split_gm: the stitched graph; its children ``submod_pp_<i>`` are the stages.
        routes: what crosses the borders.
        signature: how arguments and results are flattened.
        unused: names of the parameters and buffers that no operation uses; a stage holds them all the same.
        plan: how the cuts were chosen, or None where they were made by hand.
        proof: whether what was captured was compared with the model itself, and how.
        loss_spec: which of the model's outputs is the loss, or None.
        loss: picks it out of the outputs.
        step_loss: what the stages' schedules take where they are given no ``loss_fn``: the same, or without a
            ``loss_spec`` what the model returns under the key ``"loss"``.
        whole: the captured graph before the cut: the reference for what the pipeline computes. It shares the
            parameters; ``train()`` and ``eval()`` are its own.
    """

    whole: GraphModule

    def __init__(
        self,
        whole: GraphModule,
        split: Split,
        signature: Signature,
        plan: Plan | None = None,
        loss_spec: LossSpec | None = None,
        evaluation: ModeCut | None = None,
        *,
        proof: Proof = UNASKED,
    ) -> None:
        super().__init__()
        drafts = split.pieces, () if evaluation is None else evaluation.split.pieces
        wholes = whole, None if evaluation is None else evaluation.whole
        if evaluation is not None:
            whole, split = joined(ModeCut(whole, split, signature), evaluation)
        self.split_gm = split.module
        self.plan = plan
        self.proof = proof
        self.signature = signature
        self._pieces = split.pieces
        object.__setattr__(self, "whole", whole)  # the same parameters: not a second child
        modules = [piece.module for piece in split.pieces]
        for graph, pieces in zip(wholes, drafts, strict=True):
            if graph is not None:
                check_operations(graph, pieces)
        self.unused = tuple(unused_state(graphs_in(whole), whole))
        add_unused(whole, modules)
        add_aliases(whole, modules)
        self.routes, values = _routes(wholes[0], drafts[0], modules)
        if evaluation is not None and wholes[1] is not None:
            other = replace(_routes(wholes[1], drafts[1], modules)[0], signature=evaluation.signature)
            self.routes = replace(self.routes, evaluation=other, signature=signature)
        self.loss_spec = loss_spec
        output = signature.unflatten(self.routes.results)
        self.loss = None if loss_spec is None else OutputLoss(loss_spec, output, Named)
        self.step_loss = self.loss or loss_by_name(output, lambda leaf: _starts_gradients(leaf, values))
        self._homes = devices_of(whole, (metadata(node) for node in whole.graph.find_nodes(op="placeholder")))
        self.training = whole.training

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self._pieces)

    @property
    def has_loss_and_backward(self) -> bool:
        """Whether a call runs the backward pass too."""
        return self.loss is not None

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """For each parameter that several stages hold: its name in each of them, by the stage's name
        (``submod_pp_<i>``).
        """
        held = [dict(piece.module.named_parameters(remove_duplicate=False)) for piece in self._pieces]
        return [
            {
                self._pieces[stage].name: next(name for name in tied.names if name in held[stage])
                for stage in tied.stages
            }
            for tied in self.routes.tied
        ]

    def train(self, mode: bool = True) -> Pipe:
        """As on any module; `whole` goes along."""
        self.whole.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process; arguments and result are those of the model.

        Raises:
            ArgumentError: arguments that the model was captured without, or with other names.
            SignatureMismatch: another shape, dtype or constant than the model was captured with.
            ExecutionError: the marked loss is not one number, or depends on nothing that is trained.
        """
        args, kwargs = self.signature.bind(args, kwargs)
        flat, routes = self.signature.flatten(args, kwargs), self.routes.in_mode(self.training)
        accept(routes.inputs, flat, "the call")
        routes.at(routes.sizes_of(flat), self.training)
        output = self.split_gm(*args, **kwargs)
        elsewhere = routes is self.routes.evaluation  # there the output may be built otherwise
        if self.loss is None or elsewhere or not torch.is_grad_enabled():
            return output
        checked_loss(self.loss(output)).backward()
        return detached(output)

    def get_stage_module(self, index: int) -> GraphModule:
        """The module of one stage; its parameters have their original names.

        Raises:
            StageIndexError: there is no such stage.
        """
        self._check_stage(index)
        return self._pieces[index].module

    def _check_stage(self, index: int) -> None:
        if not 0 <= index < self.num_stages:
            raise StageIndexError(
                f"there is no stage {index}: this pipe has stages 0 to {self.num_stages - 1}"
            )

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Comm | None = None,
    ) -> Stage:
        """The stage as a rank runs it. It keeps only its own parameters alive.

        Args:
            stage_index: which stage.
            device: where it runs. What lies elsewhere is copied there, and operations that make tensors make
                them there; this pipe and the user's model stay as they are. Not given, or all there already:
                the stage's parameters are the model's own. Tensors on the meta device are left for
                `materialise`.
            group: the process group of the pipeline's ranks; the default group if neither it nor ``comm`` is
                given.
            comm: what the ranks talk through.
        """
        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), device, group, comm=comm)

    def info(self) -> PipeInfo:
        """What there is to know of the pipe without keeping it alive; as text, a listing of stages,
        parameters and what crosses.
        """
        return PipeInfo(
            graph=copy_graph(self.split_gm.graph),
            num_stages=self.num_stages,
            has_loss_and_backward=self.has_loss_and_backward,
            routes=self.routes,
            signature=self.signature,
            loss=self.step_loss,
            homes=self._homes,
            text=self._listing(),
            proof=self.proof,
        )

    def __str__(self) -> str:
        return self._listing()

    def _listing(self) -> str:
        lines = [str(self.proof), *_about_sizes(self.routes.sizes)]
        for stage, piece in enumerate(self._pieces):
            count = sum(parameter.numel() for parameter in piece.module.parameters())
            lines.append(f"stage {stage}: {len(piece.node_names)} operations, {count:,} parameters")
            for (producer, consumer), names in self.routes.forward.items():
                if producer == stage:
                    lines += [
                        f"  to stage {consumer}: {self.routes.values[name].describe()}" for name in names
                    ]
        lines += [
            f"tied: {' = '.join(tied.names)} in stages {list(tied.stages)}" for tied in self.routes.tied
        ]
        if self.routes.evaluation is not None:
            lines.append("in evaluation the model takes another path:")
            lines += [
                f"  stage {producer} to stage {consumer}: {self.routes.evaluation.values[name].describe()}"
                for (producer, consumer), names in self.routes.evaluation.forward.items()
                for name in names
            ]
        lines += [f"unused: {name}, held by stage {self._holder(name)}" for name in self.unused]
        return "\n".join(lines)

    def _holder(self, name: str) -> int:
        """The stage that holds the parameter or buffer of that name."""
        path, _, leaf = name.rpartition(".")
        for stage, piece in enumerate(self._pieces):
            try:
                getattr(piece.module.get_submodule(path), leaf)
            except AttributeError:
                continue
            return stage
        raise AssertionError(f"no stage holds {name!r}")

    def print_readable(self) -> None:
        """Print the code of the stitched graph and of every stage."""
        self.split_gm.print_readable()


def _about_sizes(sizes: Sizes) -> list[str]:
    """Which sizes are open, under which conditions; or why none is."""
    lines = [
        f"open: "
        f"{', '.join(f'{symbol.name} (of {symbol.input}, dim {symbol.dim})' for symbol in sizes.symbols)}"
    ]
    lines += [f"  where {condition.text}, because of: {condition.where}" for condition in sizes.conditions]
    if not sizes.symbols:
        because = f", because of: {sizes.fixed}" if sizes.fixed else ""
        return [f"sizes are those of the example{because}"]
    return lines


def _starts_gradients(leaf: Any, values: Mapping[str, Any]) -> bool:
    value = values.get(leaf.name) if isinstance(leaf, Named) else None
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad


def _routes(
    whole: GraphModule, pieces: tuple[Piece, ...], modules: Sequence[nn.Module]
) -> tuple[Routes, Mapping[str, Any]]:
    """And an example of each value, without data."""
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    sizes = Sizes.of(whole)
    values = fake_values(whole, [metadata(node) for node in inputs])
    producers = {node.name: 0 for node in inputs}
    for stage, piece in enumerate(pieces):
        producers.update(dict.fromkeys(piece.outputs, stage))
        _check_tensors(piece, values, sizes)
    routes = make_routes(
        [_border(piece) for piece in pieces],
        producers,
        values,
        graph_inputs(whole),
        _results(whole, sizes),
        tied_parameters(modules),
        sizes,
    )
    parameters = tuple(name for name, _ in whole.named_parameters(remove_duplicate=False))
    return replace(routes, parameters=parameters, structure=structure_of(whole)), values


def _border(piece: Piece) -> StageBorder:
    reused = frozenset(piece.outputs[number] for number in reused_outputs(piece.module))
    return StageBorder(piece.inputs, piece.outputs, written_inputs(piece.module), reused)


def _check_tensors(piece: Piece, values: dict[str, Any], sizes: Sizes) -> None:
    for name in piece.inputs:
        if not isinstance(values[name], torch.Tensor) and name not in sizes.numbers:
            raise CaptureError(
                f"{name!r}, which {piece.name} takes, is a {type(values[name]).__name__} and not a tensor: "
                "cut where only tensors cross (cuts by plan do)"
            )


def _results(whole: GraphModule, sizes: Sizes) -> list[Any]:
    """What the model returns, flat."""
    output = next(iter(reversed(whole.graph.nodes)))
    for item in output.all_input_nodes:
        if item.op == "get_attr":
            raise CaptureError(
                f"the model returns {item.target!r}, a parameter or buffer of its own, which stages can't "
                "hand out: return a copy (.clone()), or read it from the stage's module"
            )
    return [
        sizes.numbers.get(item.name, Named(item.name)) if isinstance(item, Node) else item
        for item in output.args[0]
    ]
