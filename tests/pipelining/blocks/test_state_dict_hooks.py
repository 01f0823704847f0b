"""Models whose ``state_dict()`` is not simply their tensors, cut with ``frontend="modules"``: together
the stages say what the model says, and load what it loads.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelining.running import assert_equal
from torch import Tensor, nn

from partita.errors import CheckpointError, NotProven
from partita.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from partita.pipelining.checkpoints import load_checkpoint, save_checkpoint, state_report
from partita.runtime import Comm, InProcessWorld


class _Renames(nn.Module):
    """Its inner layer is saved as if it stood alone; each hook fails where a name is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.beside = nn.Linear(4, 4)
        self.register_state_dict_post_hook(self._saved)
        self.register_load_state_dict_pre_hook(self._loaded)

    @staticmethod
    def _saved(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}{name}"] = state.pop(f"{prefix}layer.{name}")

    @staticmethod
    def _loaded(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}{name}")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.beside(x)


class _SavesItself(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}w"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}w"])


class _Prefixed(nn.Sequential):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({name[4:]: value for name, value in state_dict.items()}, strict)


class _Versioned(nn.Linear):
    """What its hook adds is no tensor of the module, which is told it when it loads."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen = 0
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}seen": torch.tensor(module.seen)})
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: setattr(module, "seen", int(state.pop(f"{prefix}seen")))
        )


def _renaming() -> nn.Module:
    return nn.Sequential(_Renames(), _Renames(), nn.Linear(4, 4))


def _saving_themselves() -> nn.Module:
    return nn.Sequential(*(_SavesItself(4, 4, bias=False) for _ in range(3)))


def _prefixed() -> nn.Module:
    return _Prefixed(*(nn.Linear(4, 4) for _ in range(3)))


def _versioned() -> nn.Module:
    return nn.Sequential(*(_Versioned() for _ in range(3)))


MODELS = (_renaming, _saving_themselves, _prefixed, _versioned)


def _cut(model: nn.Module, layer: str = "1") -> Pipe:
    cuts = {layer: SplitPoint.BEGINNING}
    return pipeline(model, (torch.zeros(2, 4),), split_spec=cuts, frontend="modules")


def _stages(pipe: Pipe) -> list[nn.Module]:
    return [pipe.get_stage_module(index) for index in range(pipe.num_stages)]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("layer", ["1", "2"])
def test_stages_say_and_load_what_the_model_says(make: Callable[[], nn.Module], layer: str) -> None:
    """A hook that pops a name ended in a KeyError on the stage that has not got it, and an override of the
    model itself was not called.
    """
    wanted, other = make().state_dict(), make()
    pipe = _cut(other, layer)
    for module in (*_stages(pipe), *copy.deepcopy(_stages(pipe))):
        names = module.state_dict().keys()
        module.load_state_dict({name: wanted[name] for name in names})
        assert_equal(dict(module.state_dict()), {name: wanted[name] for name in names})
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\)"):
            module.load_state_dict(wanted)
        module.load_state_dict(wanted, strict=False)
        nested: dict[str, Any] = {}
        module.state_dict(nested, "stage.")
        assert len(nested) == len(names)
    assert set().union(*(module.state_dict() for module in _stages(pipe))) == wanted.keys()
    state_report(pipe, other).check()


@pytest.mark.parametrize("make", MODELS)
def test_checkpoints_have_the_models_own_names_and_load_everywhere(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = make()
    for module in model.modules():
        if isinstance(module, _Versioned):
            module.seen = 3
    save_checkpoint(tmp_path / "stages", _stages(_cut(model)))
    save_checkpoint(tmp_path / "whole", model)
    wanted = dict(model.state_dict())
    for saved in ("stages", "whole"):
        whole, pipe = make(), _cut(make(), "2")
        load_checkpoint(tmp_path / saved, whole)
        assert_equal(dict(whole.state_dict()), wanted)
        load_checkpoint(tmp_path / saved, _stages(pipe))
        loaded: dict[str, Any] = {}
        for module in _stages(pipe):
            loaded |= module.state_dict()
        assert_equal(loaded, {name: wanted[name] for name in loaded})


def test_a_state_dict_that_computes_from_tensors_of_several_stages_is_refused() -> None:
    class Merges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_state_dict_post_hook(
                lambda _module, state, _prefix, _: state.update(
                    sum=state["first.weight"] @ state["second.weight"]
                )
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    module = _cut(Merges(), "second").get_stage_module(0)
    with pytest.raises(
        CheckpointError, match=r"the model's state_dict\(\) fails on stage 0, .*takes a tensor of this stage"
    ):
        module.state_dict()


def test_a_graph_warns_of_names_that_only_the_model_knows() -> None:
    with pytest.warns(NotProven, match=r"state_dict\(\) has '0.bias', .* in place of '0.layer.bias'"):
        pipeline(_renaming(), (torch.zeros(2, 4),), split_spec={"1": SplitPoint.BEGINNING}, frontend="export")


def test_a_graph_warns_of_no_names_that_only_wrappers_or_extra_state_have() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    model = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), Extra(4, 4))  # type: ignore[arg-type]
    model[1].register_state_dict_post_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        pipeline(model, (torch.zeros(2, 4),), split_spec={"1": SplitPoint.BEGINNING}, frontend="export")
    assert not [each for each in warned if "in place of" in str(each.message)]


def test_a_stage_within_a_larger_module_says_what_the_model_would_say_there() -> None:
    """The versions of its modules were lost, and names were those of the model alone."""
    model = _Prefixed(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wanted = nn.Sequential(copy.deepcopy(model)).state_dict()
    state = nn.Sequential(_cut(model).get_stage_module(1)).state_dict()
    assert list(state) == [name for name in wanted if name.startswith("0.1.")]
    assert state._metadata == wanted._metadata  # type: ignore[attr-defined]


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize("border", ["0", "1", "2"])
def test_stages_that_never_run_a_module_have_no_extra_state_of_it(border: str, tmp_path: Path) -> None:
    """The stage before had that of the cut, and saving found that the two had drifted apart."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(layers[0], _Counts(), *layers[1:])
    pipe = _cut(model, f"{int(border) + 1}")

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        schedule = ScheduleGPipe(stage, 2)
        schedule.eval(*([torch.ones(4, 4)] if comm.rank == 0 else []))
        save_checkpoint(tmp_path, stage)

    InProcessWorld(2).run(body)
    stages = _stages(_cut(model, "2"))
    load_checkpoint(tmp_path, stages)
    assert [module.state_dict()["1._extra_state"] for module in stages] == [2, 2]
