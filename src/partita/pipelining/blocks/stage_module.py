"""The module of a stage that runs the model's own code: the model's structure with one stage's state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.compile.eager_stance import nothing_compiled
from partita._torch.fake.absent_state import asked_for_no_state, save_nothing_of_its_own
from partita._torch.fake.ghosts import ghost_of, is_ghostly
from partita._torch.fake.ghosts_apart import ghosts_kept_apart
from partita._torch.fake.transforms import endings_of_transforms_seen
from partita._torch.fake.undetached_state import tensors_in_state_dict
from partita._torch.modules.calls import Around, calls_watched, overridden_calls
from partita._torch.modules.closure_copy import with_closures
from partita._torch.modules.contents import named_tables, state_tables
from partita._torch.modules.state_dicts import (
    add_versions,
    state_dict_hooks,
    with_values,
    without,
)
from partita._torch.tensors.storage import storage_key
from partita._torch.tensors.subclasses import with_class_of
from partita.errors import CheckpointError
from partita.pipelining.blocks.current_pass import EndOfStage, current_pass
from partita.pipelining.blocks.cut import BlockCut
from partita.pipelining.blocks.memos import memos_cleared
from partita.pipelining.blocks.packet import Packet
from partita.pipelining.blocks.stage_pass import StagePass
from partita.runtime.host_generators import keyed_generators, set_generators
from partita.runtime.rng import enter_site

__all__ = ["StageModule", "entering", "ghost_in_place_of", "leaving", "named_tensors"]


class StageModule(nn.Module):
    """One stage's part of a model: takes and returns a `Packet`; the last one returns what the model returns.

    Its parameters and buffers are those of the stage, under the model's own names. Ghosts take the places of
    the others while it runs.

    Args:
        root: a copy of the model.
        stage: which stage it is.
        cut: of the model.
        device: where the stage runs, if it has no parameters or buffers.
        ghosts: take the places of other stages' parameters and buffers in ``root``.
    """

    def __init__(
        self, root: nn.Module, stage: int, cut: BlockCut, device: torch.device, ghosts: Iterable[Tensor]
    ) -> None:
        super().__init__()
        # the same dicts: a change of this module's state, or a hook of it, is one of the root's
        for name in (*state_tables, *state_dict_hooks):
            vars(self)[name] = vars(root)[name]
        vars(self)["_partita_root"] = root  # not as a child: names stay the model's
        self._partita_stage = stage
        self._partita_cut = cut
        self._partita_device = device
        self._partita_processes: tuple[int, ...] = ()
        self.training = root.training
        self._partita_tables: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
        self._partita_attributes: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self._partita_own_calls = overridden_calls(root)
        ghost_ids = {id(ghost) for ghost in ghosts}
        self._partita_elsewhere: list[nn.Module] = []
        not_run = _run_later(root, stage, cut)
        for module in root.modules():
            tensors = {id(tensor) for table in named_tables(module) for tensor in table.values()}
            if tensors & ghost_ids and not tensors - ghost_ids - {id(None)}:
                _leave_state_alone(module)
                self._partita_elsewhere.append(module)
            elif not tensors - {id(None)} and id(module) in not_run:
                self._partita_elsewhere.append(module)
            for table in named_tables(module):
                of_others = {name: tensor for name, tensor in table.items() if id(tensor) in ghost_ids}
                if of_others:
                    self._partita_tables.append((table, of_others))
            aliases = {name: value for name, value in vars(module).items() if id(value) in ghost_ids}
            if aliases:
                self._partita_attributes.append((module, aliases))
        self._hide_ghosts()

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model itself, such as a temperature, is one of the stage."""
        own = vars(vars(self).get("_partita_root", self))
        return own[name] if name in own else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Likewise. What every module has, a hook or ``forward``, is the stage's own."""
        root = vars(self).get("_partita_root")
        if root is None or name in vars(self) or hasattr(nn.Module, name) or not _has(root, name):
            super().__setattr__(name, value)
        else:
            setattr(root, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageModule:
        """Copy as any module is, but for two kinds of tensors. Computed ones, which deepcopy refuses and
        ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` leave after each call, are copied
        without their history. Ghosts follow their own rule: their class may copy data only (quantised
        weights of bitsandbytes), and they have none.
        """
        for _, tensor in named_tensors(self.code_that_runs):
            if not tensor.is_leaf and id(tensor) not in memo:
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
        for _, ghosts in (*self._partita_tables, *self._partita_attributes):
            for ghost in ghosts.values():
                memo.setdefault(id(ghost), ghost_in_place_of(ghost))
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with with_closures(memo, others_shared=True) as own:
            vars(twin).update(copy.deepcopy(vars(self), own))
        return twin

    @property
    def code_that_runs(self) -> nn.Module:
        """The copy of the model whose code runs."""
        root: nn.Module = vars(self)["_partita_root"]
        return root

    @property
    def stage_index(self) -> int:
        """Which stage it is."""
        return self._partita_stage

    @property
    def block_cut(self) -> BlockCut:
        """The cut of the model."""
        return self._partita_cut

    @property
    def home(self) -> torch.device:
        """Where the stage runs."""
        tensors = chain(self.parameters(), self.buffers())
        return next((tensor.device for tensor in tensors), self._partita_device)

    def move_home(self, device: torch.device) -> None:
        """Run there, if the stage has no parameters or buffers."""
        self._partita_device = device

    def run_among(self, processes: tuple[int, ...]) -> None:
        """Run in a pipeline whose stages these global ranks run."""
        self._partita_processes = processes

    def train(self, mode: bool = True) -> StageModule:
        """Switch the mode as the model does, whose class may have a ``train`` of its own."""
        root = self.code_that_runs
        with self.ghosts_shown():
            root.train(mode)
        self.training = root.training
        return self

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What the model's own ``state_dict()`` says of the tensors of this stage.

        Raises:
            CheckpointError: a hook of the model, or its own ``state_dict()``, can't do without the values of
                other stages' tensors.
        """
        with self.ghosts_shown():
            whole, elsewhere = self._whole_state(prefix, nested=destination is not None)
        own = without(whole, elsewhere)
        if not keep_vars:
            for name, value in own.items():
                own[name] = value.detach() if isinstance(value, Tensor) else value
        if destination is None:
            return own
        destination.update(own)
        add_versions(destination, own)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load as the model does, which finds ghosts under the names of other stages. A layer whose tensors
        all belong to another stage is not asked: it may take a ``state_dict`` for an old one, where a dict
        has no versions, and miss what only older ones have.

        Raises:
            CheckpointError: as `state_dict`.
        """
        root = self.code_that_runs
        with self.ghosts_shown(), asked_for_no_state(self._partita_elsewhere):
            whole, elsewhere = self._whole_state()
            others = {name: whole[name] for name in elsewhere}
            paths = self._paths_elsewhere()

            def name_others(_module: nn.Module, names: Any) -> None:
                surplus = (key for key in state_dict if key in others or key.rpartition(".")[0] in paths)
                names.unexpected_keys.extend(surplus)

            handle = root.register_load_state_dict_post_hook(name_others)
            assigned = {"assign": True} if assign else {}  # which an older override may not take
            try:
                return root.load_state_dict(with_values(state_dict, others), strict=strict, **assigned)
            finally:
                handle.remove()

    def _whole_state(self, prefix: str = "", *, nested: bool = False) -> tuple[Mapping[str, Any], set[str]]:
        """The model's state dict, while the ghosts are shown, and the names in it of what is not this
        stage's: ghosts, what was computed from them, and all that a layer says of which another stage has
        all tensors.
        """
        tables = (*self._partita_tables, *self._partita_attributes)
        ghosts = {id(ghost) for _, table in tables for ghost in table.values()}
        own = [tensor for _, tensor in named_tensors(self.code_that_runs) if id(tensor) not in ghosts]
        try:
            with ghosts_kept_apart(own):
                whole = tensors_in_state_dict(self.code_that_runs, prefix, nested=nested)
        except Exception as error:
            raise CheckpointError(
                f"the model's state_dict() fails on stage {self._partita_stage}, which has no values of the "
                f"layers of other stages: {type(error).__name__}: {error}. A hook of it, or an override, "
                "looks at values, or computes from tensors of several stages: move the border so that these "
                'are on one stage, or cut with frontend="export", whose stages save parameters and buffers '
                "as they are, under their own names"
            ) from error
        memory = set(map(storage_key, own))
        paths = {prefix + path for path in self._paths_elsewhere()}
        elsewhere = {
            name
            for name, value in whole.items()
            if name.rpartition(".")[0] in paths
            or (isinstance(value, Tensor) and is_ghostly(value) and storage_key(value) not in memory)
        }
        return whole, elsewhere

    def _paths_elsewhere(self) -> set[str]:
        """The names of layers of which other stages have all tensors."""
        modules = self.code_that_runs.named_modules(remove_duplicate=False)
        others = set(map(id, self._partita_elsewhere))
        return {path for path, module in modules if id(module) in others}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, packet: Packet) -> Any:
        """Run the stage's part of the model.

        Raises:
            ExecutionError: the model uses a tensor that no stage has handed on, or goes another way than on
                the stages before.
        """
        device = self.home
        with self.ghosts_shown(), _generators(packet):
            enter_site(self._partita_stage)
            return self.run_pass(
                StagePass(
                    self._partita_stage,
                    self._partita_cut,
                    packet,
                    training=self.training,
                    device=device,
                    state=self.names_by_identity(),
                    processes=self._partita_processes,
                )
            )

    def run_pass(self, stage_pass: StagePass) -> Any:
        """Run the model under ``stage_pass``, while the ghosts are shown. Return what `forward` returns."""
        root: nn.Module = vars(self)["_partita_root"]
        root.training = self.training
        own_calls = calls_watched(self._partita_own_calls)
        with own_calls, memos_cleared(), nothing_compiled(), endings_of_transforms_seen(), stage_pass:
            args, kwargs = stage_pass.arguments()
            try:
                result = stage_pass.finish(root(*args, **kwargs))
            except EndOfStage:
                result = stage_pass.output
        return result

    def names_by_identity(self) -> dict[int, str]:
        """The names of the model's parameters and buffers by ``id()``, while the ghosts are shown."""
        return {id(tensor): name for name, tensor in named_tensors(vars(self)["_partita_root"])}

    @contextmanager
    def ghosts_shown(self) -> Iterator[None]:
        """In this block ghosts stand in the places of other stages' parameters and buffers."""
        for table, ghosts in self._partita_tables:
            table.update(ghosts)
        for module, ghosts in self._partita_attributes:
            vars(module).update(ghosts)
        try:
            yield
        finally:
            self._hide_ghosts()

    def _hide_ghosts(self) -> None:
        """Put None in their places: torch counts it as no parameter, and the order of the others stays."""
        for table, ghosts in self._partita_tables:
            table.update(dict.fromkeys(ghosts))
        for module, ghosts in self._partita_attributes:
            for name in [name for name, ghost in ghosts.items() if vars(module).get(name) is not ghost]:
                del ghosts[name]  # `forward` has put something else there, which stays
            vars(module).update(dict.fromkeys(ghosts))


def _run_later(root: nn.Module, stage: int, cut: BlockCut) -> set[int]:
    """Identities of the modules that only later stages run. The stages behind these run their code too,
    and need what they keep.
    """
    modules = list(root.named_modules(remove_duplicate=False))
    run_here = {id(module) for path, module in modules if cut.homes.get(path, 0) <= stage}
    return {id(module) for _, module in modules} - run_here


def _has(root: nn.Module, name: str) -> bool:
    return name in vars(root) or hasattr(type(root), name)


def _leave_state_alone(module: nn.Module) -> None:
    """Let nothing happen where a loop over modules resets or saves a layer of another stage, in which None
    stands for each tensor (``reset_parameters()``, ``torch.optim.swa_utils.update_bn``, ``state_dict()``).
    """
    save_nothing_of_its_own(module)
    for name in ("reset_parameters", "reset_running_stats"):
        if hasattr(module, name):
            vars(module)[name] = _elsewhere


def _elsewhere() -> None:
    """The tensors are those of another stage, which resets them."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model's modules, then other attributes that are tensors, each once."""
    seen: set[int] = set()
    tables = [(path, table) for path, module in model.named_modules() for table in named_tables(module)]
    attributes = [(path, vars(module)) for path, module in model.named_modules()]
    for path, table in (*tables, *attributes):
        for name, value in table.items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value


def ghost_in_place_of(tensor: Tensor) -> Tensor:
    """A ghost that is a parameter or buffer as ``tensor`` is, of its class."""
    ghost = ghost_of(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        ghost = nn.Parameter(ghost, tensor.requires_grad)
    return with_class_of(tensor, ghost)


def entering(path: str, arguments: Any) -> Around | None:
    """Tell the current pass that a module is about to be called."""
    stage_pass = current_pass()
    return None if stage_pass is None else stage_pass.enter(path, arguments)


def leaving(path: str) -> None:
    """Tell the current pass that a module has returned."""
    stage_pass = current_pass()
    if stage_pass is not None:
        stage_pass.leave(path)


@contextmanager
def _generators(packet: Packet) -> Iterator[None]:
    """Put Python's and numpy's generators into the states that they had on the first stage."""
    if packet.generators is not None:
        set_generators(packet.generators)
        yield
        return
    with keyed_generators():
        yield
