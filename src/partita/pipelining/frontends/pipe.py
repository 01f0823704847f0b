"""The base class of pipes: models cut into stages, which run locally or are given to ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.export.signature import Signature
from partita._torch.graph_module.graph_copy import copy_graph
from partita.capture.proving.proof import UNASKED, Proof
from partita.errors import PlanError, StageIndexError
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.interface.loss import LossSpec, OutputLoss, checked_loss, loss_by_name
from partita.pipelining.interface.pipe_info import PipeInfo
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.flight import detached
from partita.pipelining.stages.original_model import OriginalModel
from partita.pipelining.stages.other_weights import OtherWeights
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.planned_schedule import planned_schedule, planned_stages
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.planning import Plan
from partita.runtime import Comm
from partita.runtime.example_arguments import ExampleArguments

__all__ = ["Pipe", "stage_name"]

stage_name = "submod_pp_{}".format
"""The name of a stage, by its index, among the children of `Pipe.split_gm`."""


class Pipe(nn.Module, ABC):
    """A model cut into stages, as `pipeline` returns it: a ``GraphPipe``, or a ``ModulePipe`` with
    ``frontend="modules"``.

    A call runs the stages one after the other in this process, with the model's own signature, output
    structure, autograd and random numbers. The parameters are the model's own.

    With a ``loss_spec`` a call runs the backward pass too: it fills the gradients (where grad mode is on) and
    returns tensors without a graph. Its stages' schedules need no ``loss_fn`` then.

    Attributes:
        split_gm: calls the stages one after the other; its children ``submod_pp_<i>`` are the stages.
        routes: what crosses the borders.
        signature: how arguments and results are flattened; None where the model's own code takes them.
        plan: how the cuts were chosen, or None where they were made by hand.
        proof: whether what was cut was compared with the model itself, and how.
        whole: the captured graph before the cut; pipes of the model's own code (``frontend="modules"``) have
            none.
        recompute: the stages that are recomputed as a whole in the backward pass.
        compile_options: how stages are compiled; None: not at all.
        loss_spec: which of the model's outputs is the loss, or None.
        loss: picks the loss out of the outputs, where there is a ``loss_spec``.
        step_loss: the loss of schedules without a ``loss_fn``: ``loss``, or without a ``loss_spec`` what the
            model returns under the key ``"loss"``.
    """

    whole: GraphModule

    def __init__(
        self,
        split_gm: GraphModule,
        routes: Routes,
        signature: Signature | None,
        homes: frozenset[torch.device],
        plan: Plan | None,
        proof: Proof = UNASKED,
    ) -> None:
        super().__init__()
        self.split_gm = split_gm
        self.routes = routes
        self.signature = signature
        self.plan = plan
        self.proof = proof
        self.recompute: frozenset[int] = frozenset()
        self.compile_options: CompileOptions | None = None
        self.loss_spec: LossSpec | None = None
        self.loss: OutputLoss | None = None
        self.step_loss: OutputLoss | None = None
        self.original = OriginalModel()
        self.example: ExampleArguments | None = None
        self._homes = homes

    def _find_loss(
        self, loss_spec: LossSpec | None, output: Any, leaf: type, starts_gradients: Callable[[Any], bool]
    ) -> None:
        """Set `loss_spec`, `loss` and `step_loss`.

        Args:
            output: a tree like the model's output.
            leaf: the type of its leaves that are tensors.
            starts_gradients: whether a leaf is one number that has gradients.
        """
        self.loss_spec = loss_spec
        self.loss = None if loss_spec is None else OutputLoss(loss_spec, output, leaf)
        self.step_loss = self.loss or loss_by_name(output, starts_gradients)

    def cut_with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """Keep what the example's lists are like: see `ExampleArguments`."""
        self.example = ExampleArguments.of(args, kwargs, self.signature)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.routes.stages

    @property
    def unkept(self) -> tuple[str, ...]:
        """The attributes (tensors, numbers and text) that the model's ``forward`` sets, and stages do not. In
        the proof, which makes two calls in a row in each mode, they made no difference.
        """
        return self.proof.unkept

    @property
    def has_loss_and_backward(self) -> bool:
        """Whether a call runs the backward pass too."""
        return self.loss is not None

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """For each parameter that several stages hold, its name in each of them by the stage's name
        (``submod_pp_<i>``).
        """
        parameters = [
            dict(module.named_parameters(remove_duplicate=False)) for module in self._stage_modules()
        ]
        return [
            {
                stage_name(stage): next(name for name in tied.names if name in parameters[stage])
                for stage in tied.stages
            }
            for tied in self.routes.tied
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process; arguments and result are those of the model.

        Raises:
            ArgumentError: the model was captured without these arguments, or with other names.
            SignatureMismatch: the model was captured with another shape, dtype or constant.
            ExecutionError: the marked loss is not one number, or depends on nothing that is trained; or, with
                ``frontend="modules"``, a stage uses a value that it did not use with the example.
        """
        output = self._run_stages(args, kwargs)
        # a model that takes another path in evaluation may return another structure there
        other_structure = self.routes.in_mode(self.training) is self.routes.evaluation
        if self.loss is None or other_structure or not torch.is_grad_enabled():
            return output
        checked_loss(self.loss(output)).backward()
        return detached(output)

    @abstractmethod
    def _run_stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run all stages and return what the model returns."""

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of one stage; its parameters have their original names.

        Raises:
            StageIndexError: there is no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise StageIndexError(
                f"there is no stage {stage_idx}: this pipe has stages 0 to {self.num_stages - 1}"
            )
        return self.split_gm.get_submodule(stage_name(stage_idx))

    def _stage_modules(self) -> Iterator[nn.Module]:
        return map(self.get_stage_module, range(self.num_stages))

    @abstractmethod
    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Comm | None = None,
    ) -> Stage:
        """Return the stage as a rank runs it. It keeps only its own parameters alive.

        Args:
            stage_index: which stage.
            device: where it runs. Tensors that lie elsewhere are copied there, and operations that make
                tensors make them there; this pipe and the user's model are not changed. Copied parameters
                have the class, attributes, gradients and hooks that ``model.to(device)`` leaves them. With
                None, or where all tensors are there already, the stage's parameters are the model's own.
                Tensors on the meta device are left for `materialise`.
            group: the process group of the pipeline's ranks; the default group if neither it nor ``comm`` is
                given.
            comm: the communication between the ranks.
        """

    def _other_weights(self, stage_index: int) -> OtherWeights:
        return OtherWeights(
            (index, name, parameter)
            for index, module in enumerate(self._stage_modules())
            for name, parameter in module.named_parameters()
            if index != stage_index
        )

    def schedule(
        self,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        **options: Any,
    ) -> PipelineSchedule:
        """Build the stages that the plan places on this rank, and the schedule that it names. Collective.

        ``schedule.stages`` has the stages by index; delete the pipe, and only they stay in memory.

        Args:
            loss_fn: from (output, target) to a 0-d tensor.
            device: where the stages run; see `build_stage`.
            group: the process group of the pipeline's ranks; the default group if neither it nor ``comm`` is
                given.
            comm: the communication between the ranks.
            options: those of `PipelineSchedule`, such as ``seed``.

        Raises:
            PlanError: the pipe was cut by hand, or for another number of ranks; on every rank.
        """
        if self.plan is None:
            raise PlanError(
                "this pipe was cut by hand, and no plan says where its stages run: cut it with plan='auto', "
                "a plan or stages=N, or call build_stage() and make a schedule of your own choice"
            )
        own = planned_stages(self.plan, comm, group)
        stages = [self.build_stage(index, device, group, comm=comm) for index in own]
        return planned_schedule(self.plan, stages, loss_fn, **options)

    def info(self) -> PipeInfo:
        """Return a description that keeps none of the pipe's modules alive; see `PipeInfo`."""
        return PipeInfo(
            graph=copy_graph(self.split_gm.graph),
            num_stages=self.num_stages,
            has_loss_and_backward=self.has_loss_and_backward,
            routes=self.routes,
            signature=self.signature,
            loss=self.step_loss,
            homes=self._homes,
            text=str(self),
            proof=self.proof,
            recompute=self.recompute,
            example=self.example,
            compile_options=self.compile_options,
        )

    def __str__(self) -> str:
        tied = [f"tied: {' = '.join(tied.names)} in stages {list(tied.stages)}" for tied in self.routes.tied]
        again = [f"recomputed as a whole: stages {sorted(self.recompute)}"] if self.recompute else []
        return "\n".join([str(self.proof), *self._about_stages(), *tied, *again, *self._remarks()])

    @abstractmethod
    def _about_stages(self) -> Iterator[str]:
        """Lines of the listing for the stages."""

    def _remarks(self) -> Iterator[str]:
        """Lines at the end of the listing."""
        return iter(())

    def print_readable(self) -> None:
        """Print the code of the stitched graph and of every stage."""
        self.split_gm.print_readable()
