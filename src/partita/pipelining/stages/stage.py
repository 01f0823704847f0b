"""One stage as a rank runs it: forward and backward of one microbatch at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita._torch.autograd.engine import hooks_made, run_backward
from partita._torch.graph_module.lazy_module import LazyGraphModule
from partita.errors import ExecutionError
from partita.pipelining.compiled.compiled_forward import CompiledForward
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.interface.routes import Routes, Tied
from partita.pipelining.recompute.checkpointed_pass import CheckpointedPass
from partita.pipelining.recompute.checkpointing import Checkpointing
from partita.pipelining.recompute.runs_twice import check_hooks, check_wrapper, warn_of_python
from partita.pipelining.stages.backward.arrivals import Arrivals
from partita.pipelining.stages.backward.saved_buffers import SavedBuffers
from partita.pipelining.stages.backward.split_backward import WeightPass, input_pass
from partita.pipelining.stages.backward.tied_share import TiedShares, kept_apart
from partita.pipelining.stages.compile_module import compile_module
from partita.pipelining.stages.copying import CopiedInItsProcess
from partita.pipelining.stages.data_parallel import GradientReduction, gradient_reduction
from partita.pipelining.stages.flight import Flight, hand_to_caller, let_go_of_inputs, roots_of
from partita.pipelining.stages.hooked_parameters import HookedParameters
from partita.pipelining.stages.original_model import OriginalModel
from partita.pipelining.stages.other_ranks import check_replicas
from partita.pipelining.stages.other_weights import OtherWeights
from partita.pipelining.stages.parts import check_parts_are_as_cut
from partita.pipelining.stages.step_count import StepCount
from partita.planning import ActionKind
from partita.runtime import Comm, enter_site
from partita.runtime.example_arguments import ExampleArguments
from partita.runtime.graph_compiler import InnerCompiler
from partita.runtime.piece_runner import ReceiveMemory

__all__ = ["Stage"]


class Stage(CopiedInItsProcess, ABC):
    """A stage's module with what it needs to know about its neighbours.

    Made by ``Pipe.build_stage``: a `GraphStage`, or a `BlockStage` where the model's own code is cut. A
    `PipelineStage` is made by the user.

    Attributes:
        index: which stage it is.
        routes: what crosses all the borders of the pipeline, in the present mode.
        by_mode: the same for both modes.
        crossing: for each microbatch of a step its routes, where they are not those of the pipeline.
        comm: what the ranks talk through; None: made from ``group``. A copy of the stage has the same.
        group: the process group of the pipeline's ranks; None: the default group.
        loss_fn: returns the loss from the model's results, where it is among them.
        hooks: what to call for the actions of a schedule that concern the whole stage (UNSHARD, RESHARD,
            REDUCE_GRAD); those without a hook do nothing.
        dw_builder: for a module that delays the gradients of its weights by itself: called after each
            backward pass (B or I), it returns a function that computes them, for W, or for the end of B.
        other_weights: the parameters of the model's other stages.
        original: the model that was cut.
        step_count: how many steps the last schedule that was made with the stage has run.
        input_memory: where what it receives is written; None: in new memory each time.
        recompute: run the forward pass again at the start of each backward pass (of B or I), and keep only
            what entered the stage until then. May be changed between two steps.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        routes: Routes,
        device: torch.device,
        *,
        comm: Comm | None = None,
    ) -> None:
        self._device = device
        self._inner, self._saved = module, SavedBuffers(module)  # the same when the user wraps `module`
        self.module = module
        self.index = index
        self.crossing: tuple[Routes, ...] = ()
        self._microbatch = 0
        self._result: Any = None
        self.comm = comm
        self.group: dist.ProcessGroup | None = None
        self.loss_fn: Callable[..., Tensor] | None = None
        self.example: ExampleArguments | None = None
        self.hooks: dict[ActionKind, Callable[[], object]] = {}
        self.dw_builder: Callable[[], Callable[[], object]] | None = None
        self.other_weights = OtherWeights()
        self.original = OriginalModel()
        self.step_count = StepCount()
        self.recompute = False
        self.input_memory: ReceiveMemory | None = None
        self._checkpointing: Checkpointing | None = None
        self._checkpointed: CheckpointedPass | None = None
        self._site: int | None = None
        self.by_mode = routes
        self.follow(routes.in_mode(module.training))
        self._flights: dict[int, Flight] = {}
        self._late: dict[int, Callable[[], object]] = {}
        self._reduction: GradientReduction | None = None
        self._hooked = HookedParameters(module, index, 0)

    def follow(self, routes: Routes) -> None:
        """Exchange with other stages what ``routes`` say, from now on."""
        self.routes = routes
        self.border = routes.borders[self.index]
        self._tied = TiedShares(self._inner, self.index, routes)

    @property
    def module(self) -> nn.Module:
        """The stage; move it, wrap or compile it, give its parameters to an optimizer."""
        return self._module

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._module = module
        # A GraphModule's own __call__ prints where an exception came from and drops its traceback.
        self._call: Callable[..., Any] = (
            partial(LazyGraphModule.__call__, module) if isinstance(module, LazyGraphModule) else module
        )
        if self._inner not in module.modules():  # another one, and not a wrapper
            self._inner, self._saved = module, SavedBuffers(module)
            self._checkpointing = None

    @property
    def submod(self) -> nn.Module:
        """Another name of `module`, as ``torch.distributed.pipelining`` calls it."""
        return self.module

    @submod.setter
    def submod(self, module: nn.Module) -> None:
        self.module = module

    @property
    def stage_index(self) -> int:
        """Another name of `index`, as ``torch.distributed.pipelining`` calls it."""
        return self.index

    @property
    def num_stages(self) -> int:
        """How many stages the whole pipeline has."""
        return self.routes.stages

    @property
    def is_first(self) -> bool:
        """Whether it is given the model's arguments."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the model's results."""
        return self.index == self.routes.stages - 1

    @property
    def in_flight(self) -> int:
        """How many microbatches are between forward and the end of backward."""
        return len(self._flights) + len(self._late)

    @property
    def device(self) -> torch.device:
        """Where its parameters (or, without any, its buffers) are; where none has memory, the ``device`` that
        it was made for.
        """
        tensors = chain(self._inner.parameters(), self._inner.buffers())
        return next((tensor.device for tensor in tensors if not tensor.is_meta), self._device)

    @property
    def unwrapped(self) -> nn.Module:
        """The module inside of what the user wrapped around it."""
        return self._inner

    def parameter(self, group: Tied) -> nn.Parameter:
        """This stage's copy of a tied parameter."""
        return self._tied.parameter(group, self._inner)

    def compile(
        self,
        backend: InnerCompiler = "inductor",
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        dynamic: bool | None = None,
    ) -> None:
        """Compile the stage, when it first runs: its forward pass, its evaluation, and its backward pass as a
        whole (B) or in halves (I and W), as the schedule needs them. Equal stages compile once.

        Wrap the module (in ``DistributedDataParallel``) and shard it (``fully_shard``) before or afterwards.
        A stage that can't be compiled warns (`partita.errors.NotCompiled`) and runs as it is.

        Args:
            backend: ``"inductor"``; ``"aot_eager"``, which runs the graphs as they are, bit for bit like the
                uncompiled stage; a function from a flat graph and example inputs to what runs it; or a
                `partita.runtime.PieceRunner`.
            mode: of Inductor, as for ``torch.compile``.
            options: of Inductor.
            dynamic: whether sizes are compiled as symbols; None: those that change.

        Raises:
            ArgumentError: an unknown backend, mode or option.
        """
        self.compile_with(CompileOptions(backend, mode, dict(options or {}), dynamic))

    def compile_with(self, options: CompileOptions) -> None:
        """The same, with the options in one object."""
        compile_module(self._inner, self.index, self.by_mode, options)
        self.input_memory = options.input_memory()

    def forward(self, microbatch: int, values: Mapping[str, Any], *, train: bool) -> dict[str, Any]:
        """Run one microbatch.

        Args:
            values: the stage's inputs, by name.
            train: keep what the backward pass needs.

        Returns:
            The stage's outputs by name; on the last stage also values that it only hands out.

        Raises:
            SignatureMismatch: an output of another shape, dtype or gradient flag than the others expect.
            ExecutionError: see `BlockStage`.
        """
        if train:
            self._tied.check_are_as_cut(self._inner)
        before = hooks_made()
        self._microbatch = microbatch
        flight, handed = self._run(values, train=train)
        if train:
            flight.hooked = hooks_made() != before
            if self._checkpointed is not None:
                flight.checkpointed, self._checkpointed = self._checkpointed, None
            self._flights[microbatch] = flight
        return handed

    @abstractmethod
    def _run(self, values: Mapping[str, Any], *, train: bool) -> tuple[Flight, dict[str, Any]]:
        """What the backward pass of this microbatch needs, and what `forward` returns."""

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call if self._reduction is None else self._reduction.forward
        if self._site is not None:
            enter_site(self._site)
        if self.recompute and torch.is_grad_enabled():
            return self._called_for_now(call, args, kwargs)
        if self._saved.idle:
            return call(*args, **kwargs)
        with self._saved.kept(self._module) as note:
            result = call(*args, **kwargs)
            note(result)
        return result

    def _called_for_now(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, when the forward pass will run again before the backward pass."""
        if self._checkpointing is None:
            # a `StageModule` runs a copy of the model
            code = getattr(self._inner, "code_that_runs", self._inner)
            self._checkpointing = Checkpointing(f"stage {self.index}", code)
            if self._checkpointing.runs_python:
                warn_of_python(self.index)
        check_hooks(self.module, self.index)
        if self._reduction is None:
            check_wrapper(self.module, self._inner, self.index)
        result, self._checkpointed = self._checkpointing.run(
            call, args, kwargs, self._call_again, self.device
        )
        return result

    def _call_again(self, *args: Any, **kwargs: Any) -> None:
        if self._site is not None:
            enter_site(self._site)
        call = self._call if self._reduction is None else self._reduction.unwrapped
        call(*args, **kwargs)

    def assemble(self) -> Any:
        """What the model returns for the microbatch that this stage, the last, has just run."""
        result, self._result = self._result, None
        return result

    def start_from(self, microbatch: int, loss: Tensor, seed: Tensor, *, hooked: bool = False) -> None:
        """Let the backward pass of a microbatch start from a loss as well.

        Args:
            seed: its gradient.
            hooked: whether hooks were registered while it was computed.
        """
        flight = self._flights[microbatch]
        flight.loss = (loss, seed)
        flight.hooked |= hooked

    def backward(
        self, microbatch: int, gradients: Mapping[str, Tensor], loss: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Tensor | None]:
        """Run the whole backward pass of one microbatch.

        Args:
            gradients: by name: of the stage's outputs; of its inputs where later users sent their share; of
                tied parameters.
            loss: as in `start_from`.

        Returns:
            The gradients of the stage's inputs and of tied parameters that an earlier stage owns, by name;
            None for one that the loss does not depend on.
        """
        if loss is not None:
            self.start_from(microbatch, *loss)
        results = self._whole_backward(microbatch, gradients)
        if self.dw_builder is not None:
            self.dw_builder()()
        return results

    def _whole_backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        flight = self._flights.pop(microbatch)
        if flight.checkpointed is not None:
            flight.checkpointed.run_again()
        roots, seeds = roots_of(flight, gradients)
        shares = self._tied.of_microbatch(self._inner, gradients, roots, seeds)
        wanted = {name: leaf for name, leaf in flight.leaves.items() if leaf.requires_grad}
        arrivals = Arrivals(tuple(wanted.values()))
        if shares:
            with kept_apart(shares, replicated=self._reduction is not None) as results:
                self._accumulate(roots, seeds)
        else:
            results = {}
            self._accumulate(roots, seeds)
        results.update(zip(wanted, arrivals.gradients(), strict=True))
        if flight.sources:
            hand_to_caller(flight.sources, {**gradients, **results})
        return results

    def _accumulate(self, roots: list[Tensor], seeds: list[Tensor]) -> None:
        with self._hooked.unchanged():
            if self._reduction is not None:
                self._reduction.backward(roots, lambda: run_backward(roots, seeds, accumulate=True))
            elif roots:
                run_backward(roots, seeds, accumulate=True)

    def backward_input(self, microbatch: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Run the first half of `backward`. It returns the same, and changes no parameter's ``.grad`` unless
        data parallel wrappers need the whole pass at once.
        """
        if self._at_once or self.dw_builder is not None:
            results = self._whole_backward(microbatch, gradients)
            self._late[microbatch] = self.dw_builder() if self.dw_builder is not None else WeightPass().run
            return results
        flight = self._flights.pop(microbatch)
        if flight.checkpointed is not None:
            flight.checkpointed.run_again()
        roots, seeds = roots_of(flight, gradients)
        shares = self._tied.of_microbatch(self._inner, gradients, roots, seeds)
        shares = [share for share in shares if not share.owned]
        names = [name for name, leaf in flight.leaves.items() if leaf.requires_grad]
        half = input_pass(
            roots,
            seeds,
            [flight.leaves[name] for name in names],
            [share.parameter for share in shares],
            hooked=flight.hooked,
        )
        results = dict(zip(names, half.gradients, strict=True))
        results |= zip((share.name for share in shares), half.shares, strict=True)
        self._late[microbatch] = half.weights.run
        if flight.sources:
            hand_to_caller(flight.sources, {**gradients, **results})
        del roots
        let_go_of_inputs(flight, results)
        return results

    def backward_weight(self, microbatch: int) -> None:
        """Run the second half of `backward`, which adds to ``.grad`` of the parameters."""
        late = self._late.pop(microbatch)
        with self._hooked.unchanged():
            if self._reduction is None or self._at_once:
                late()
            else:
                self._reduction.backward(None, late)

    @property
    def _at_once(self) -> bool:
        """Whether a data parallel wrapper needs whole backward passes. DDP waits for the gradients of all its
        parameters, and the second half has none for a tied parameter that another stage owns.
        """
        if self._reduction is None:
            return False
        return self._reduction.at_once or self._tied.are_of_others

    def begin(self, microbatches: int) -> None:
        """Start a training step of so many microbatches."""
        check_parts_are_as_cut(self.module, self.index)
        self._reduction = gradient_reduction(self.module)
        self._hooked = HookedParameters(self._inner, self.index, microbatches)
        compiled = vars(self._inner).get("forward")
        if isinstance(compiled, CompiledForward):
            compiled.begin()
        if self.recompute and self.dw_builder is not None:
            raise ExecutionError(
                f"stage {self.index} has a dw_builder and is to be recomputed: its module would delay the "
                "gradients of its weights twice; leave one of the two out"
            )
        if self._reduction is None:
            return
        if self.recompute:
            self._reduction.check_recompute(self.index)
        if self.dw_builder is not None:
            raise ExecutionError(
                f"stage {self.index} has a dw_builder and is data parallel: gradients would be reduced "
                "before they are computed; leave the dw_builder out, any module's backward pass is split"
            )
        self._reduction.begin(microbatches)

    def run_among(self, processes: tuple[int, ...]) -> None:
        """Learn, before a step or an evaluation, which global ranks run the pipeline's stages; none where its
        ranks are no processes. A collective in the stage over others of them is refused: they would not come.

        Raises:
            ExecutionError: the stage has replicas or shards on ranks that run other stages.
        """
        check_replicas(self.module, processes, self.index)

    def compile_ahead(self, arguments: Mapping[str, Tensor], kinds: Collection[ActionKind]) -> None:
        """Compile, before a step begins to run, what it will run of this stage for the first time. A stage
        that takes something else than tensors, or that a wrapper of data parallel training runs, is compiled
        when it first runs.

        Args:
            arguments: what the model is given for the first microbatch, where this is the first stage.
            kinds: what the schedule does with the stage.
        """

    def forget(self) -> None:
        """Drop all microbatches in flight (after a failure)."""
        self._flights.clear()
        self._late.clear()
