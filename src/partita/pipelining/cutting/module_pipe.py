"""A pipe whose stages are chains of the model's own submodules, made without capturing them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita._torch.fake_module import run_on_fakes
from partita._torch.fx import lazy_module
from partita._torch.graph_copy import copy_graph
from partita._torch.pytree import flatten, tree_map
from partita.pipelining.cutting.block_trace import Binding
from partita.pipelining.cutting.pipe import Pipe
from partita.pipelining.loss import LossSpec, OutputLoss, checked_loss, loss_by_name
from partita.pipelining.pipe_info import PipeInfo
from partita.pipelining.stages.flight import detached
from partita.pipelining.stages.manual import PipelineStage, draft_routes
from partita.pipelining.stages.own_memory import with_own_memory
from partita.pipelining.stages.relocate import devices_of, relocated
from partita.pipelining.steps.tied import tied_parameters
from partita.runtime import Comm

__all__ = ["ModulePipe"]


class ModulePipe(Pipe):
    """What ``pipeline(..., frontend="modules")`` returns: like a `Pipe`, but its stages run the model's own
    code, each block as it is.

    Shapes are found when a step needs them, so any batch size runs. In a pipeline random numbers follow
    (seed, step, microbatch, stage), as for any stage that is a plain module; called locally, the pipe draws
    as the model does.

    Args:
        model: what was cut.
        modules: the stages.
        binding: how the model's arguments are passed to the first.
        args: the example's inputs, bound.
        loss_spec: see `pipeline`.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[GraphModule],
        binding: Binding,
        args: tuple[Any, ...],
        loss_spec: LossSpec | None,
    ) -> None:
        nn.Module.__init__(self)
        self.split_gm = _stitched(modules, training=model.training)
        self.binding = binding
        self.plan = None
        self.loss_spec = loss_spec
        self.training = model.training
        self.routes = draft_routes(len(modules), tied_parameters(modules))
        self._homes = devices_of(model, flatten(args)[0])
        self._examples, output = _examples(modules, args)
        self.loss = None if loss_spec is None else OutputLoss(loss_spec, output, Tensor)
        self.step_loss = self.loss or loss_by_name(output, _is_number)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.routes.stages

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """For each parameter that several stages hold: its name in each of them, by the stage's name
        (``submod_pp_<i>``).
        """
        return [{f"submod_pp_{stage}": tied.names[0] for stage in tied.stages} for tied in self.routes.tied]

    def train(self, mode: bool = True) -> ModulePipe:
        """As on any module."""
        nn.Module.train(self, mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process; arguments and result are those of the model.

        Raises:
            SignatureMismatch: other arguments than the model was cut with, but for tensors.
            ExecutionError: the marked loss is not one number, or depends on nothing that is trained.
        """
        output = self.split_gm(*self.binding.bind(args, kwargs))
        if self.loss is None or not torch.is_grad_enabled():
            return output
        checked_loss(self.loss(output)).backward()
        return detached(output)

    def get_stage_module(self, index: int) -> GraphModule:
        """The module of one stage; its parameters have their original names.

        Raises:
            IndexError: there is no such stage.
        """
        if not 0 <= index < self.num_stages:
            raise IndexError(f"there is no stage {index}: this pipe has stages 0 to {self.num_stages - 1}")
        module = self.split_gm.get_submodule(f"submod_pp_{index}")
        assert isinstance(module, GraphModule)
        return module

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Comm | None = None,
    ) -> PipelineStage:
        """The stage as a rank runs it; arguments are those of `Pipe.build_stage`."""
        module: nn.Module = self.get_stage_module(stage_index)
        if device is not None:
            module = relocated(module, torch.device(device), self._homes)
        module = with_own_memory(module, comm)
        inputs, outputs = self._examples.get(stage_index, (None, None))
        first = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)
        stage = PipelineStage(
            module,
            stage_index,
            self.num_stages,
            device or first or "cpu",
            input_args=inputs,
            output_args=outputs,
            group=group,
            comm=comm,
            routes=self.routes,
            bind=self.binding.bind if stage_index == 0 else _no_arguments,
        )
        stage.loss_fn = self.step_loss
        return stage

    def info(self) -> PipeInfo:
        """What there is to know of the pipe without keeping it alive."""
        return PipeInfo(
            graph=copy_graph(self.split_gm.graph),
            num_stages=self.num_stages,
            has_loss_and_backward=self.has_loss_and_backward,
            routes=self.routes,
            signature=None,
            loss=self.step_loss,
            homes=self._homes,
            text=str(self),
        )

    def __str__(self) -> str:
        lines = []
        for stage in range(self.num_stages):
            module = self.get_stage_module(stage)
            count = sum(parameter.numel() for parameter in module.parameters())
            blocks = [str(node.target) for node in module.graph.find_nodes(op="call_module", sort=True)]
            lines.append(f"stage {stage}: {', '.join(blocks) or 'no blocks'}, {count:,} parameters")
        lines += [
            f"tied: {' = '.join(tied.names)} in stages {list(tied.stages)}" for tied in self.routes.tied
        ]
        return "\n".join(lines)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def _no_arguments(_: tuple[Any, ...], __: Mapping[str, Any]) -> tuple[Any, ...]:
    """The model's arguments are the first stage's; the others take what the one before them returns."""
    return ()


def _stitched(modules: Sequence[GraphModule], *, training: bool) -> GraphModule:
    """Calls the stages one after the other."""
    graph = Graph()
    names = [node.name for node in modules[0].graph.find_nodes(op="placeholder")]
    values = [graph.placeholder(name) for name in names]
    for stage, module in enumerate(modules):
        result = graph.call_module(f"submod_pp_{stage}", tuple(values))
        if stage < len(modules) - 1:
            (output,) = module.graph.find_nodes(op="output")
            values = [
                graph.call_function(operator.getitem, (result, place)) for place in range(len(output.args[0]))
            ]
    graph.output(result)
    stitched = lazy_module(graph, "Stages", training=training)
    for stage, module in enumerate(modules):
        stitched.add_module(f"submod_pp_{stage}", module)
    return stitched


def _examples(
    modules: Sequence[GraphModule], args: tuple[Any, ...]
) -> tuple[dict[int, tuple[Any, Any]], Any]:
    """For stages that can't be run without data what they took and returned for the example, and the model's
    output; tensors on the meta device.

    Such a stage, and those before it, are run on data once, as copies and without gradients.
    """
    device = next((leaf.device for leaf in flatten(args)[0] if isinstance(leaf, Tensor)), torch.device("cpu"))
    examples: dict[int, tuple[Any, Any]] = {}
    given: Any = args
    for stage, module in enumerate(modules):
        try:
            result = run_on_fakes(module, given, {}, device)[0]
        except Exception:  # whatever the model's code raises on a value that is not there
            result = _run(modules[: stage + 1], args)
            examples[stage] = (_on_meta(given), _on_meta(result))
        given = result = _on_meta(result)
    return examples, given


def _run(modules: Sequence[GraphModule], args: tuple[Any, ...]) -> Any:
    """On copies; nothing of the model changes, nor do the random generators."""
    with torch.random.fork_rng(), torch.no_grad():
        values: Any = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, args)
        for module in modules:
            values = copy.deepcopy(module)(*values)
    return values


def _on_meta(tree: Any) -> Any:
    return tree_map(
        lambda leaf: (
            torch.empty_like(leaf, device="meta", requires_grad=False) if isinstance(leaf, Tensor) else leaf
        ),
        tree,
    )
