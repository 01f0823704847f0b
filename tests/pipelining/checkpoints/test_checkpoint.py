"""Checkpoints from any cut into any other, and to and from what torch itself writes."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.pipelining.resuming import (
    CASE,
    MICROBATCHES,
    Trained,
    advance,
    optimizer_for,
    pipe_of,
    scramble,
    stages_of,
    state_of,
    train_stages,
    train_whole,
    whole,
)
from tests.pipelining.running import assert_equal
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from partita.errors import ArgumentError, CheckpointError, NotProven
from partita.pipelining import Schedule1F1B, pipeline
from partita.pipelining.checkpoints import latest_checkpoint
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.files import manifest_writer
from partita.runtime import Comm, InProcessWorld


@pytest.fixture(autouse=True)
def _torch_is_quiet() -> Any:
    """torch's own save and load, called here without processes, warn that there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process.*")
        yield


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, torch.Tensor]:
    """Four steps of the uncut model."""
    trained = whole()
    train_whole(trained, 0, 4)
    return state_of(trained[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps in two stages."""
    trained = stages_of(2)
    train_stages(trained, 0, 2)
    path = tmp_path_factory.mktemp("saved") / "step2"
    save_checkpoint(path, *trained, extra={"step": 2, "rng": torch.arange(3)})
    return path


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (lambda: stages_of(3, seed=5), train_stages),
        (lambda: stages_of(1, seed=5), train_stages),
        (lambda: whole(seed=5), train_whole),
    ],
    ids=["3 stages", "1 stage", "uncut"],
)
def test_training_goes_on_in_another_cut_bit_for_bit(
    saved: Path,
    uninterrupted: dict[str, torch.Tensor],
    make: Callable[[], Trained],
    run: Callable[[Trained, int, int], None],
) -> None:
    trained = make()
    restored = load_checkpoint(saved, *trained)
    assert restored.missing == ()
    assert restored.extra["step"] == 2
    assert torch.equal(restored.extra["rng"], torch.arange(3))
    run(trained, 2, 2)
    assert_equal(state_of(trained[0]), uninterrupted)


def test_a_checkpoint_of_the_uncut_model_goes_on_in_stages(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    trained = whole()
    train_whole(trained, 0, 2)
    save_checkpoint(tmp_path, *trained)
    stages = stages_of(3, seed=5)
    load_checkpoint(tmp_path, *stages)
    train_stages(stages, 2, 2)
    assert_equal(state_of(stages[0]), uninterrupted)


@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "nested"])
def test_what_torch_saved_loads_into_stages(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor], flatten: bool
) -> None:
    trained = whole()
    train_whole(trained, 0, 2)
    (model,), (optimizer,) = trained
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path)
    stages = stages_of(3, seed=5)
    load_checkpoint(tmp_path, *stages)
    train_stages(stages, 2, 2)
    assert_equal(state_of(stages[0]), uninterrupted)


def test_torch_loads_what_stages_saved(saved: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    trained = whole(seed=5)
    (model,), (optimizer,) = trained
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=saved)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    train_whole(trained, 2, 2)
    assert_equal(state_of(trained[0]), uninterrupted)


def test_names_are_those_of_the_users_model(saved: Path) -> None:
    there = dcp.FileSystemReader(saved).read_metadata().state_dict_metadata
    names = {key.removeprefix("model.") for key in there if key.startswith("model.")}
    assert names == CASE.model().state_dict().keys()


def test_a_tied_parameter_is_stored_once(saved: Path) -> None:
    places = {
        index.fqn: (info.relative_path, info.offset)
        for index, info in dcp.FileSystemReader(saved).read_metadata().storage_data.items()
    }
    assert places["model.embedding.weight"] == places["model.head.weight"]
    assert places["optim.state.embedding.weight.exp_avg"] == places["optim.state.head.weight.exp_avg"]
    model = CASE.model()
    stored = sum(file.stat().st_size for file in saved.glob("*.distcp"))
    assert stored < 3 * sum(p.numel() * 4 for p in model.parameters()) + 1400 * len(places)


def test_a_model_without_sections_is_found_by_an_empty_key(tmp_path: Path) -> None:
    model = CASE.model()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    stages, _ = stages_of(2, seed=5)
    with pytest.raises(CheckpointError, match=r"but it has 'embedding.weight': pass model_key=''"):
        load_checkpoint(tmp_path, stages)
    load_checkpoint(tmp_path, stages, model_key="")
    assert_equal(state_of(stages), dict(model.state_dict()))


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    stages, _ = stages_of(2)
    for stage in stages:
        stage.module = torch.compile(stage.module, backend="eager")
    save_checkpoint(tmp_path, stages)
    into, _ = stages_of(3, seed=5)
    load_checkpoint(tmp_path, [torch.compile(stage.module, backend="eager") for stage in into])
    for stage in stages:
        stage.module = stage.module._orig_mod
    assert_equal(state_of(into), state_of(stages))


class _Extra(nn.Module):
    def __init__(self, seen: Any = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


_SEEN = (7, [1, 2], {"a": 1, "b": [{"c": "text"}, torch.ones(2)], "b.c": {"0": None}})


@pytest.mark.parametrize("writer", ["partita", "torch"])
@pytest.mark.parametrize("seen", _SEEN)
def test_extra_state_of_a_whole_model_is_kept(tmp_path: Path, writer: str, seen: Any) -> None:
    """Torch stores a dict item by item, and state that was one stayed as it was, without a word."""
    model, other = _Extra(seen), _Extra()
    if writer == "torch":
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    else:
        save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, other)
    assert_equal(other.seen, seen)
    assert_equal(dict(other.inner.state_dict()), dict(model.inner.state_dict()))


def test_extra_state_of_stages_is_kept(tmp_path: Path) -> None:
    def stages(seen: Any, count: int) -> list[Any]:
        model, x = nn.Sequential(_Extra(seen), _Extra({"k": seen})), torch.ones(1, 2)
        pipe = pipeline(model, (x,), stages=count, frontend="modules")
        return [pipe.build_stage(index) for index in range(count)]

    save_checkpoint(tmp_path, stages(5, 2))
    (other,) = stages(0, 1)
    load_checkpoint(tmp_path, other)
    assert [module.seen for module in other.module.modules() if isinstance(module, _Extra)] == [5, {"k": 5}]
    whole = nn.Sequential(_Extra(), _Extra())
    load_checkpoint(tmp_path, whole)
    assert [module.seen for module in whole] == [5, {"k": 5}]


def test_extra_state_that_the_checkpoint_does_not_have_is_an_error(tmp_path: Path) -> None:
    """Stages of a graph have none."""
    model = nn.Sequential(_Extra(3))
    with pytest.warns(NotProven, match=r"get_extra_state\(\) returns of '0' is in no stage of a graph"):
        pipe = pipeline(model, (torch.ones(1, 2),), stages=1)
    save_checkpoint(tmp_path, pipe.build_stage(0))
    with pytest.raises(CheckpointError, match=r"does not have 'model.0._extra_state'.*strict=False"):
        load_checkpoint(tmp_path, model)
    assert load_checkpoint(tmp_path, model, strict=False).missing == ("0._extra_state",)


def test_before_the_first_step_an_optimizer_has_no_state(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, *stages_of(2))
    stages, optimizers = stages_of(3)
    train_stages((stages, optimizers), 0, 1)
    load_checkpoint(tmp_path, stages, optimizers)
    assert not any(optimizer.state for optimizer in optimizers)


def test_state_of_higher_precision_than_its_parameter_stays_so(tmp_path: Path) -> None:
    """torch's own load_state_dict would round it."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer

    (model, optimizer), (other, into) = made(), made()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, other, into)
    assert [state["momentum_buffer"].dtype for state in into.state.values()] == [torch.float32] * 2
    assert float(into.state[other.weight]["momentum_buffer"][0, 0]) == pytest.approx(1 / 3, abs=1e-7)


def test_state_of_the_dtype_of_its_parameter_is_cast_with_it(tmp_path: Path) -> None:
    """The next step ended in torch's "expected dtype float for `end` but got dtype c10::BFloat16"."""

    def stepped(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2, dtype=dtype)
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        return model, optimizer

    save_checkpoint(tmp_path, *stepped(torch.float32))
    model, optimizer = stepped(torch.bfloat16)
    load_checkpoint(tmp_path, model, optimizer, cast=True)
    optimizer.step()
    assert {value["exp_avg"].dtype for value in optimizer.state.values()} == {torch.bfloat16}


def test_a_save_that_was_cut_off_at_its_end_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1, 1)
    for last in ("write_manifest", "checksums"):
        with monkeypatch.context() as patch:
            patch.setattr(manifest_writer, last, _cut_off)
            with pytest.raises(CheckpointError, match="could not be written"):
                save_checkpoint(tmp_path / "step", model)
        assert latest_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path / "step", model)
    assert latest_checkpoint(tmp_path) == tmp_path / "step"
    assert not list(tmp_path.glob("step/*unfinished*"))


def _cut_off(*_args: Any) -> None:
    raise OSError("the disk is gone")


def test_a_second_save_to_one_place_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="holds a checkpoint already: save to another directory"):
        save_checkpoint(tmp_path, nn.Linear(1, 1))


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nothing' holds no checkpoint that can be read \(\.metadata: No such"
    ):
        load_checkpoint(tmp_path / "nothing", nn.Linear(1, 1))


def test_a_checkpoint_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written: NotADirectoryError"):
        save_checkpoint(tmp_path / "file" / "below", nn.Linear(1, 1))


def test_a_missing_name_is_named_and_may_be_allowed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(2, 2, bias=False))
    layer = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"does not have 'model.bias': load what was saved from this"):
        load_checkpoint(tmp_path, layer)
    assert load_checkpoint(tmp_path, layer, strict=False).missing == ("bias",)


def test_another_shape_is_an_error_with_both(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"'model.weight' has shape \[3, 2\] in .*, and \[4, 2\] here"):
        load_checkpoint(tmp_path, nn.Linear(2, 4))


def test_another_dtype_is_an_error_unless_cast(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)
    save_checkpoint(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"is torch.float32 in .*, and torch.float64 here: convert"):
        load_checkpoint(tmp_path, other)
    load_checkpoint(tmp_path, other, cast=True)
    assert torch.equal(other.weight, model.weight.double())


def test_meta_state_is_neither_saved_nor_loaded_into(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="'weight' is on the meta device: materialise the stage before sav"
    ):
        save_checkpoint(tmp_path, nn.Linear(2, 2, device="meta"))
    save_checkpoint(tmp_path, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"'model.weight' is on the meta device: materialise the stage"):
        load_checkpoint(tmp_path, nn.Linear(2, 2, device="meta"))


def test_no_optimizer_state_is_an_error_unless_allowed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(2, 2))
    layer = nn.Linear(2, 2)
    optimizer = optimizer_for(layer)
    with pytest.raises(
        CheckpointError, match=r"no optimizer state for 'bias', 'weight': pass the optimizers"
    ):
        load_checkpoint(tmp_path, layer, optimizer)
    load_checkpoint(tmp_path, layer, optimizer, strict=False)


def test_copies_that_drifted_apart_are_an_error_unless_the_first_is_wanted(tmp_path: Path) -> None:
    stages, _ = stages_of(4)
    with torch.no_grad():
        stages[3].module.get_parameter("head.weight")[0, 0] += 1
    message = (
        "'model.embedding.weight' is not the same on two stages of rank 0 (both float32[16, 8], with "
        "different values): copies of one parameter or buffer have drifted apart"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        save_checkpoint(tmp_path, stages)
    save_checkpoint(tmp_path, stages, replicas="first")
    into, _ = stages_of(1)
    load_checkpoint(tmp_path, into)
    assert torch.equal(
        into[0].module.get_parameter("head.weight"), stages[0].module.get_parameter("embedding.weight")
    )


def _train_and_go_on(comm: Comm, first: bytes, second: bytes, path: str) -> Any:
    """A rank of a real pipeline: two stages on two ranks, then three stages on the same ranks."""
    torch.set_num_threads(1)
    stage = pickle.loads(first).build_stage(comm.rank, comm=comm)
    optimizer = optimizer_for(stage.module)
    advance(Schedule1F1B(stage, MICROBATCHES, CASE.loss), optimizer, 0, 2)
    save_checkpoint(path, stage, optimizer, extra={"from": comm.rank})

    pipe = pickle.loads(second)
    stages = [pipe.build_stage(index, comm=comm) for index in ((0, 2) if comm.rank == 0 else (1,))]
    optimizer = optimizer_for(nn.ModuleList(stage.module for stage in stages))
    scramble([stage.module for stage in stages], comm.rank)
    assert load_checkpoint(path, stages, optimizer).extra == {"from": 0}
    advance(Schedule1F1B(stages, MICROBATCHES, CASE.loss), optimizer, 2, 2)
    states = state_of(stages)
    return {name: value.tolist() for name, value in states.items()}


def test_processes_save_and_another_cut_goes_on(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    pipes = [pickle.dumps(pipe_of(stages)) for stages in (2, 3)]
    states = ProcessWorld(2).run(_train_and_go_on, *pipes, str(tmp_path))
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    for state in states:
        assert state == {name: uninterrupted[name].tolist() for name in state}
    assert set().union(*states) == uninterrupted.keys()


def _goes_wrong(comm: Comm, path: str) -> list[str]:
    messages = []
    drifted, empty = nn.Linear(3, 3, bias=False), nn.Linear(1, 1, device="cpu" if comm.rank else "meta")
    nn.init.constant_(drifted.weight, float(comm.rank))
    for model in (drifted, empty):
        try:
            save_checkpoint(path, model)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_what_is_wrong_is_told_on_all_ranks(tmp_path: Path) -> None:
    first, second = ProcessWorld(2).run(_goes_wrong, str(tmp_path / "never"))
    assert first == second
    assert first[0].startswith(
        "'model.weight' is not the same on ranks 0 and 1 (both float32[3, 3], with diff"
    )
    assert first[1].startswith("rank 0: 'weight' is on the meta device: materialise")
    assert not (tmp_path / "never").exists()


def _sharded(comm: Comm, path: str) -> Any:
    """Fully sharded data parallel over both ranks: tensors are DTensors, each rank has half of each."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(path, model, optimizer)
    before = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
    momentum = optimizer.state[model[0].weight]["exp_avg"].full_tensor().tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_checkpoint(path, model, other)
    assert {name: value.full_tensor().tolist() for name, value in model.state_dict().items()} == before
    assert other.state[model[0].weight]["exp_avg"].full_tensor().tolist() == momentum
    return before, momentum


def test_sharded_stages_are_saved_once_and_load_sharded_and_whole(tmp_path: Path) -> None:
    (before, momentum), _ = ProcessWorld(2).run(_sharded, str(tmp_path))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    load_checkpoint(tmp_path, model, optimizer)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == before
    assert optimizer.state[model[0].weight]["exp_avg"].tolist() == momentum
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_to_give_is_said_where_stages_are_something_else(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe_of(1)).build_stage(0, comm=comm), 4, CASE.loss)
        for stages in (schedule, [schedule]):
            with pytest.raises(
                ArgumentError, match=r"stages holds a Schedule1F1B: give what pipe\.build_stage"
            ):
                save_checkpoint(tmp_path / "never", stages)  # type: ignore[arg-type]

    InProcessWorld(1).run(body)
    with pytest.raises(ArgumentError, match="stages holds a str"):
        load_checkpoint(tmp_path / "never", "model")  # type: ignore[arg-type]


def test_what_is_no_stage_and_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    pipe = pipe_of(2)
    for save_or_load in (save_checkpoint, load_checkpoint):
        with pytest.raises(ArgumentError, match="stages is a pipe, whose modules have other names"):
            save_or_load(tmp_path / "a", pipe)
        with pytest.raises(ArgumentError, match="optimizers holds a str: give optimizers themselves"):
            save_or_load(tmp_path / "a", stages_of(2)[0], optimizer_for(nn.Linear(2, 2)).state_dict())
