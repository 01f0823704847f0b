"""What a stage keeps, and how it travels."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.pipelining.models import NORMED, OUTPUTS, PLAIN, REGIONS, TRANSFORMER, Case
from tests.pipelining.running import assert_equal, assert_same, cut, piped, uncut
from torch import nn

from partita.errors import CaptureError
from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, pipeline
from partita.pipelining.training import verify_step
from partita.runtime import Comm, InProcessWorld

VARIED = pytest.mark.parametrize("case", [TRANSFORMER, OUTPUTS, REGIONS, NORMED], ids=lambda case: case.name)


def test_a_built_stage_keeps_only_its_own_parameters_alive() -> None:
    model = PLAIN.model()
    watched = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    pipe = cut(PLAIN, 4)
    watched |= {
        f"{index}.{name}": weakref.ref(parameter)
        for index in range(4)
        for name, parameter in pipe.get_stage_module(index).named_parameters()
    }
    stage = pipe.build_stage(1)
    del pipe, model
    gc.collect()
    alive = {name for name, reference in watched.items() if reference() is not None}
    assert alive == {"1.b.weight", "1.b.bias"}
    assert [name for name, _ in stage.module.named_parameters()] == ["b.weight", "b.bias"]


def test_a_stage_of_a_tied_model_keeps_the_tied_parameter_once() -> None:
    stage = cut(TRANSFORMER, 2).build_stage(1)
    state = stage.module.state_dict()
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert len(list(stage.module.parameters())) == len({id(p) for p in stage.module.parameters()})


class Translator(nn.Module):
    """All three embeddings are one, as in T5; the decoder's is not used under its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "layer": nn.Linear(4, 4)})
        self.decoder = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "layer": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.decoder["embedding"].weight = self.encoder["embedding"].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encoder["layer"](self.encoder["embedding"](tokens))
        return self.head(self.decoder["layer"](x))


def test_a_stage_that_does_not_use_a_tied_parameter_does_not_hold_it() -> None:
    """The stage of T5's decoder held the vocabulary and passed its gradient on, for its name's sake."""
    spec = dict.fromkeys(("decoder.layer", "head"), SplitPoint.BEGINNING)
    pipe = pipeline(Translator(), (torch.arange(4)[None],), split_spec=spec)
    names = [[name for name, _ in pipe.get_stage_module(at).named_parameters()] for at in range(3)]
    assert names[1] == ["decoder.layer.weight", "decoder.layer.bias"]
    assert [group.stages for group in pipe.routes.tied] == [(0, 2)]
    state = {**pipe.get_stage_module(0).state_dict(), **pipe.get_stage_module(2).state_dict()}
    assert {"encoder.embedding.weight", "decoder.embedding.weight", "head.weight"} <= state.keys()


def test_the_parameters_of_a_stage_have_the_models_names_and_order() -> None:
    """A tied embedding was ``head.weight`` in every stage, and other parameters came as the graph uses them:
    groups by name (no weight decay for embeddings) became other groups.
    """
    names = [name for name, _ in TRANSFORMER.model().named_parameters()]
    pipe = cut(TRANSFORMER, 3)
    for index in range(3):
        own = [name for name, _ in pipe.get_stage_module(index).named_parameters()]
        assert own == [name for name in names if name in own]
    assert "embedding.weight" in own


@VARIED
def test_a_pipe_survives_pickling_and_copying(case: Case) -> None:
    expected = uncut(case)
    pipe = cut(case, 3)
    assert_same(piped(pickle.loads(pickle.dumps(pipe)), case), expected)
    assert_same(piped(copy.deepcopy(pipe), case), expected)
    assert_same(piped(pipe, case), expected)  # and was not changed by it


LOADER = """
import pickle, sys
module, args, expected = pickle.load(open(sys.argv[1], "rb"))
import torch
result = module(*args)
assert torch.equal(result, expected), (result, expected)
module.train()
print(sorted(module.state_dict()))
"""


def test_a_stage_module_can_be_sent_to_another_process(tmp_path: Path) -> None:
    module = cut(NORMED, 2).get_stage_module(0).eval()
    args, _, _ = NORMED.data(2)
    (tmp_path / "stage").write_bytes(pickle.dumps((module, args, module(*args))))
    command = [sys.executable, "-c", LOADER, str(tmp_path / "stage")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(module.state_dict()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own look at it
@pytest.mark.parametrize("way", ["torch.compile", "Module.compile"])
def test_compiled_stages_run_in_a_pipeline(way: str) -> None:
    case, expected = TRANSFORMER, uncut(TRANSFORMER)
    pipe = cut(case, 2)

    def body(comm: Comm) -> list[list[torch.Tensor]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        optimizer = torch.optim.AdamW(stage.module.parameters(), lr=0.05)
        if way == "torch.compile":
            stage.module = torch.compile(stage.module, backend="eager")
        else:
            stage.module.compile(backend="eager")
        schedule, per_step = Schedule1F1B(stage, 4, case.loss), []
        for step in range(2):
            args, _, target = case.data(8, seed=10 + step)
            losses: list[torch.Tensor] = []
            schedule.step(*args, target=target, losses=losses)
            per_step.append(losses)
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        return per_step

    torch._dynamo.reset()
    per_step = InProcessWorld(2).run(body)[1]
    assert_equal(per_step, expected.losses[:2])
    torch._dynamo.reset()


PIPE_LOADER = """
import pickle, sys
pipe, args, expected = pickle.load(open(sys.argv[1], "rb"))
import torch
torch.manual_seed(3)
result = pipe(*args)
assert torch.equal(result, expected), (result, expected)
from partita.pipelining import Schedule1F1B
from partita.runtime import InProcessWorld
def body(comm):
    stage = pipe.build_stage(comm.rank, comm=comm)
    Schedule1F1B(stage, 2, lambda out, _: out.square().mean()).step(args[0].repeat(2, 1))
    return sorted(stage.module.state_dict())
print(InProcessWorld(2).run(body))
"""


def test_a_pipe_can_be_sent_to_another_process_and_run_there_bit_for_bit(tmp_path: Path) -> None:
    """There, a pipe that was pickled can't be loaded."""
    pipe = cut(NORMED, 2)
    args, _, _ = NORMED.data(2)
    sent = pickle.dumps(pipe)
    torch.manual_seed(3)
    (tmp_path / "pipe").write_bytes(pickle.dumps((pickle.loads(sent), args, pipe(*args))))
    command = [sys.executable, "-c", PIPE_LOADER, str(tmp_path / "pipe")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([sorted(pipe.get_stage_module(i).state_dict()) for i in range(2)])


def test_train_and_eval_reach_the_uncut_graph_too() -> None:
    pipe = cut(NORMED, 2).eval()
    args, _, _ = NORMED.data(2)
    assert not pipe.whole.training
    assert_equal(pipe.whole(*args), pipe(*args))
    assert pipe.train().whole.training


def test_a_stage_can_be_pickled_and_copied() -> None:
    stage = cut(NORMED, 2).build_stage(0)
    stage.module.eval()
    args, _, _ = NORMED.data(2)
    for other in (pickle.loads(pickle.dumps(stage)), copy.deepcopy(stage)):
        assert (other.index, other.routes.describe()) == (0, stage.routes.describe())
        assert_equal(other.module(*args), stage.module(*args))
        assert other.module.get_parameter("a.weight") is not stage.module.get_parameter("a.weight")


def test_parameters_of_several_stages_are_listed_by_stage() -> None:
    pipe = cut(TRANSFORMER, 3)
    assert pipe.replicated_params == [{"submod_pp_0": "embedding.weight", "submod_pp_2": "embedding.weight"}]
    assert cut(PLAIN, 3).replicated_params == []
    assert not pipe.has_loss_and_backward


def test_a_model_without_memory_is_planned_from_what_it_computes() -> None:
    """Its costs can't be measured; on the meta device every operation takes as long as its dispatch."""

    def made() -> nn.Module:
        wide = [nn.Linear(256, 256) for _ in range(2)]
        return nn.Sequential(
            nn.Linear(8, 256), *wide, nn.Linear(256, 8), *(nn.Linear(8, 8) for _ in range(8))
        )

    with torch.device("meta"):
        pipe = pipeline(made(), (torch.empty(64, 8),), stages=2)
    sizes = [sum(p.numel() for p in pipe.get_stage_module(index).parameters()) for index in range(2)]
    assert min(sizes) > 256 * 256  # one wide layer each, and not half of the layers


class _Propagation(nn.Module):
    """A graph network: what its nodes know goes along the edges, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
        self.register_buffer("adjacency", torch.sparse_coo_tensor(edges, torch.ones(3), (3, 3)).coalesce())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(self.adjacency, self.a(x)).relu()
        x = torch.sparse.mm(self.adjacency, self.b(x)).relu()
        return cast("torch.Tensor", self.c(x))


def test_a_sparse_buffer_of_several_stages_lies_on_each_of_them() -> None:
    """The first step wanted to send it: what autograd saves of a buffer is copied, and copies were dense."""
    model = _Propagation()
    pipe = pipeline(model, (torch.randn(3, 4),), split_spec={"b": SplitPoint.BEGINNING})
    assert pipe.proof.holds

    def train(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 2, nn.MSELoss())
        reference = UncutReference(copy.deepcopy(model), 2, nn.MSELoss())
        for _ in range(2):
            verify_step(schedule, reference, torch.ones(6, 4), target=torch.zeros(6, 4))

    InProcessWorld(2).run(train)


class _MakesSparse(_Propagation):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adjacency = x.new_ones(3, 3).tril().to_sparse()
        x = torch.sparse.mm(adjacency, self.a(x)).relu()
        x = torch.sparse.mm(adjacency, self.b(x)).relu()
        return cast("torch.Tensor", self.c(x))


def test_a_sparse_value_between_stages_is_refused_at_the_cut() -> None:
    """The first step refused it, of a pipe that called itself proven."""
    model, x = _MakesSparse(), torch.randn(3, 4)
    text = (
        r"which .* takes from another stage, is a sparse tensor \(3, 3\), and stages send dense ones: make it"
    )
    with pytest.raises(CaptureError, match=text):
        pipeline(model, (x,), split_spec={"b": SplitPoint.BEGINNING})
    pipe = pipeline(model, (x,), split_spec={"c": SplitPoint.BEGINNING})
    assert torch.equal(pipe(x), model(x))
