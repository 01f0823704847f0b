"""A pipeline that was cut with one batch and runs with others: another size, one sample, a batch that does
not divide.
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from tests.pipelining.models import CASES, NORMED, PLAIN, REUSED, TRANSFORMER, WIDTH, Case
from tests.pipelining.running import Record, assert_equal, assert_same, cut, keyed, piped
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.nn import functional

from partita.errors import PeerFailed, SignatureMismatch
from partita.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, UncutReference, pipeline
from partita.runtime import Comm, InProcessWorld

OPEN = [case for case in CASES if case is not REUSED]  # its buffer has the size of the batch
SIZES = (24, 10, 8)  # in 4: six each; 3, 3, 2, 2; two each


def _run(sizes: tuple[int, ...]) -> Any:
    def run(runner: Any, modules: list[nn.Module], case: Case, record: Record) -> None:
        for samples in sizes:
            args, kwargs, target = case.data(samples, seed=samples)
            losses: list[Tensor] = []
            record.outputs.append(runner.step(*args, target=target, losses=losses, **kwargs))
            record.outputs.append(runner.eval(*args, **kwargs))
            record.losses.append(losses)
            for module in modules:
                record.note(module)

    return run


def _uncut(case: Case, sizes: tuple[int, ...], cut_with: int = 2) -> Record:
    whole = keyed(case, cut_with)
    record = Record()
    _run(sizes)(UncutReference(whole, 4, case.loss), [whole], case, record)
    return record


@pytest.mark.parametrize("case", OPEN, ids=lambda case: case.name)
def test_other_and_uneven_batches_are_the_uncut_model_bit_for_bit(case: Case) -> None:
    pipe = cut(case, len(case.after) + 1)
    assert pipe.routes.symbols
    assert_same(piped(pipe, case, run=_run(SIZES)), _uncut(case, SIZES))


@pytest.mark.parametrize(
    ("case", "cut_with"),
    [(PLAIN, 1), (PLAIN, 5), (TRANSFORMER, 1), pytest.param(TRANSFORMER, 5, marks=pytest.mark.dear)],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_microbatches_of_one_sample_and_cuts_made_with_one(case: Case, cut_with: int) -> None:
    sizes = (4, 5, 12)
    assert_same(piped(cut(case, 3, cut_with), case, run=_run(sizes)), _uncut(case, sizes, cut_with))


@pytest.mark.parametrize("case", OPEN, ids=lambda case: case.name)
def test_a_local_call_with_another_batch_is_the_model(case: Case) -> None:
    model, pipe = case.model().eval(), cut(case, 3).eval()
    for samples in (6, 1):
        args, kwargs, _ = case.data(samples)
        assert_equal(pipe(*args, **kwargs), model(*args, **kwargs))


class Mean(nn.Module):
    """Uses the size of the batch at its end: in another stage than the one that is given the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.b(self.a(x).reshape(x.shape[0] * 2, -1).flatten().reshape(x.shape[0], -1)).sum(0)
            / x.shape[0]
        )


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_cut_with_two_and_run_with_six_divides_by_six_where_torch_divides_by_two() -> None:
    torch.manual_seed(0)
    model, x = Mean(), torch.randn(6, WIDTH)
    spec = {"b": theirs.SplitPoint.BEGINNING}

    class Simple(Mean):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).sum(0) / x.shape[0]

    simple = Simple()
    (output,) = theirs.pipeline(copy.deepcopy(simple), (x[:2],), split_spec=spec)(x)
    torch.testing.assert_close(output, 3 * simple(x))
    for kind in (simple, model):
        pipe = pipeline(kind, (x[:2],), split_spec={"b": SplitPoint.BEGINNING})
        assert torch.equal(pipe(x), kind(x))
        outputs = InProcessWorld(2).run(
            lambda comm, pipe=pipe: ScheduleGPipe(pipe.build_stage(comm.rank, comm=comm), 1).eval(x)
        )
        assert torch.equal(outputs[1], kind(x))


def test_sizes_are_worked_out_on_each_rank_and_not_sent() -> None:
    pipe = pipeline(Mean(), (torch.randn(2, WIDTH),), split_spec={"b": SplitPoint.BEGINNING})
    (number,) = set(pipe.routes.numbers) & set(pipe.routes.borders[1].inputs)
    assert number not in pipe.routes.values
    assert pipe.routes.at((6,)).numbers[number] == 6
    assert pipe.routes.at((6,)) is pipe.routes.at((6,))


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_the_gradient_of_an_uneven_batch_is_that_of_the_mean_over_all_of_it(
    kind: type[ScheduleGPipe],
) -> None:
    model, (args, _, target) = PLAIN.model(), PLAIN.data(10)
    PLAIN.loss(model(*args), target).backward()
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> dict[str, Tensor]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        kind(stage, 4, PLAIN.loss).step(*args, target=target)
        return {name: value.grad for name, value in stage.module.named_parameters()}

    gradients = {name: value for part in InProcessWorld(2).run(body) for name, value in part.items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_an_uneven_batch_is_weighted_also_where_no_target_says_how_large_it_is() -> None:
    def loss(output: Tensor, _: object) -> Tensor:
        return output.square().mean()

    model, (args, _, _) = PLAIN.model(), PLAIN.data(10)
    loss(model(*args), None).backward()
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> Tensor:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        ScheduleGPipe(stage, 4, loss).step(*args)
        return next(stage.module.parameters()).grad

    torch.testing.assert_close(InProcessWorld(2).run(body)[0], model.a.weight.grad)


def test_ten_rows_in_four_microbatches_come_back_as_ten() -> None:
    args, _, _ = PLAIN.data(10)
    pipe = cut(PLAIN, 3)
    output = InProcessWorld(3).run(
        lambda comm: ScheduleGPipe(pipe.build_stage(comm.rank, comm=comm), 4).eval(*args)
    )[2]
    model = PLAIN.model()
    assert torch.equal(output, torch.cat([model(part) for part in args[0].split((3, 3, 2, 2))]))


class Branches(Mean):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return h * 2 if x.shape[0] == 1 else h


class Fixed(Mean):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] == 2
        return self.b(self.a(x))


SPEC = {"b": SplitPoint.BEGINNING}


def test_a_branch_on_the_size_is_never_taken_wrongly() -> None:
    x = torch.randn(4, WIDTH)
    pipe = pipeline(Branches(), (x[:2],), split_spec=SPEC)
    assert pipe(x).shape == (4, WIDTH)
    text = r"batch is 1, but .* captured for batch != 1 \(asked for by return h \* 2 if x.shape\[0\] == 1"
    with pytest.raises(SignatureMismatch, match=text):
        pipe(x[:1])

    def body(comm: Comm) -> Any:
        return ScheduleGPipe(pipe.build_stage(comm.rank, comm=comm), 4).eval(x)

    with pytest.raises((SignatureMismatch, PeerFailed), match="captured for batch != 1"):
        InProcessWorld(2).run(body)


def test_a_size_that_the_model_fixes_is_named_with_its_line() -> None:
    x = torch.randn(4, WIDTH)
    pipe = pipeline(Fixed(), (x[:2],), split_spec=SPEC)
    assert not pipe.routes.symbols
    line = r"assert x\.shape\[0\] == 2  # .*test_dynamic\.py:\d+ in forward"
    with pytest.raises(
        SignatureMismatch, match=rf"float32\[4, 8\] for x: float32\[2, 8\].* because of: {line}"
    ):
        pipe(x)
    assert "sizes are those of the example, because of: assert x.shape[0] == 2" in str(pipe.info())


class Windows(Mean):
    """Works out the batch from the number of windows, with an ``int()`` around, as Swin transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        windows = self.a(x).view(-1, 2, WIDTH // 2)
        batch = int(windows.shape[0] / (WIDTH * 2 / WIDTH / 2))
        return self.b(functional.dropout(windows, 0.5, self.training).view(batch, WIDTH)) / int(x.shape[0])


class Filled(Mean):
    """A tensor as long as ``len(x)`` is filled behind the cut, and has a gradient only from there on."""

    def forward(self, x: Tensor) -> Tensor:
        filled, h = torch.zeros(len(x), WIDTH), self.a(x)
        for column, values in enumerate(h.unbind(1)):
            filled[:, column] = values
        return self.b(filled)


@pytest.mark.parametrize("model", [Windows, Filled])
def test_a_size_that_the_model_makes_an_int_of_stays_open(model: type[nn.Module]) -> None:
    case = Case(model.__name__, model, after=("a",))
    pipe = cut(case, 2)
    assert [symbol.name for symbol in pipe.routes.symbols] == ["batch"]
    assert_same(piped(pipe, case, run=_run(SIZES)), _uncut(case, SIZES))
    x = torch.randn(1, WIDTH)
    assert torch.equal(pipe.eval()(x), case.model().eval()(x))


def test_a_buffer_of_the_size_of_the_batch_fixes_it() -> None:
    pipe = cut(REUSED, 2)
    assert not pipe.routes.symbols
    assert "self.seen.copy_(h)" in str(pipe.info())


def test_dynamic_shapes_are_torch_exports_own() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.b(self.a(x).softmax(1)) * scale / x.shape[1]

    model, x, scale = Sequence(), torch.randn(2, 5, WIDTH), torch.randn(1, WIDTH)
    length = torch.export.Dim("length")
    shapes = {"x": {1: length}, "scale": None}
    pipe = pipeline(model, (x,), {"scale": scale}, split_spec=SPEC, dynamic_shapes=shapes)
    longer = torch.randn(2, 7, WIDTH)
    assert torch.equal(pipe(longer, scale=scale), model(longer, scale=scale))
    assert [symbol.dim for symbol in pipe.routes.symbols] == [1]
    with pytest.raises(SignatureMismatch, match=r"float32\[3, 7, 8\] for x: float32\[2, x_1, 8\]"):
        pipe(torch.randn(3, 7, WIDTH), scale=scale)


def test_without_dynamic_shapes_another_batch_is_refused() -> None:
    pipe = cut(NORMED, 2, dynamic_shapes=False)
    with pytest.raises(SignatureMismatch, match=r"float32\[3, 8\] for x: float32\[2, 8\]"):
        pipe(torch.randn(3, WIDTH))


class Masked(nn.Module):
    """Takes several arguments, one of them a tree and one by keyword, which share their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, more: dict[str, tuple[Tensor, int]], *, scale: Tensor) -> Tensor:
        mask, power = more["mask"]
        return self.b(self.a(tokens).cumsum(1) * mask.unsqueeze(2)) * scale**power


@pytest.mark.parametrize("by_name", [False, True])
def test_another_length_is_refused_and_the_advice_works(by_name: bool) -> None:
    def call(samples: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = torch.ones(samples, length, dtype=torch.long)
        more, scale = {"mask": (torch.rand(samples, length), 2)}, {"scale": torch.full((1,), 0.5)}
        return ((), {"tokens": tokens, "more": more, **scale}) if by_name else ((tokens, more), scale)

    model = Masked()
    args, kwargs = call(2, 5)
    pipe = pipeline(model, args, kwargs, split_spec=SPEC)
    advice = (
        r"\[batch, 5\] where batch is 3.*dynamic_shapes=(\{'tokens': \{0: Dim.AUTO, 1: Dim.AUTO\}, .*\}), as"
    )
    with pytest.raises(SignatureMismatch, match=advice) as refusal:
        pipe(*call(3, 7)[0], **call(3, 7)[1])
    match = re.search(advice, str(refusal.value))
    assert match is not None
    pipe = pipeline(
        model, args, kwargs, split_spec=SPEC, dynamic_shapes=eval(match[1], {"Dim": torch.export.Dim})
    )
    args, kwargs = call(3, 7)
    assert torch.equal(pipe(*args, **kwargs), model(*args, **kwargs))


def test_a_length_is_not_opened_where_it_is_not_all_that_differs() -> None:
    pipe = pipeline(
        Masked(),
        (torch.ones(2, 5, dtype=torch.long), {"mask": (torch.rand(2, 5), 2)}),
        {"scale": torch.ones(1)},
        split_spec=SPEC,
    )
    with pytest.raises(SignatureMismatch, match=r"other example arguments$"):
        pipe(torch.ones(2, 7, dtype=torch.long), {"mask": (torch.rand(2, 7), 3)}, scale=torch.ones(1))


def test_a_number_among_the_results_follows_the_batch() -> None:
    class Rows(Mean):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return self.b(self.a(x)), x.shape[0] + 1

    x = torch.randn(6, WIDTH)
    pipe = pipeline(Rows(), (x[:2],), split_spec=SPEC)
    assert pipe(x)[1] == 7
    outputs = InProcessWorld(2).run(
        lambda comm: ScheduleGPipe(pipe.build_stage(comm.rank, comm=comm), 3).eval(x)
    )
    assert outputs[1][1] == 3


def test_two_inputs_with_batches_of_their_own() -> None:
    class Two(Mean):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.a(x)) + y.mean(0)

    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    model = Two()
    pipe = pipeline(model, (x[:2], y[:2]), split_spec=SPEC)
    assert {symbol.name for symbol in pipe.routes.symbols} == {"x_0", "y_0"}
    assert torch.equal(pipe(x, y[:3]), model(x, y[:3]))


def test_a_local_call_with_another_batch_has_the_models_gradients() -> None:
    model, (args, _, target) = PLAIN.model(), PLAIN.data(6)
    pipe = cut(PLAIN, 3)
    functional.mse_loss(pipe(*args), target).backward()
    functional.mse_loss(model(*args), target).backward()
    gradients = {
        name: value.grad
        for index in range(3)
        for name, value in pipe.get_stage_module(index).named_parameters()
    }
    assert_equal(gradients, {name: value.grad for name, value in model.named_parameters()})


def _in_processes(comm: Comm) -> bytes:
    torch.set_num_threads(1)
    stage = cut(PLAIN, comm.size).build_stage(comm.rank, comm=comm)
    record = Record()
    _run((10, 8))(Schedule1F1B(stage, 4, PLAIN.loss), [stage.module], PLAIN, record)
    return pickle.dumps(record)


def test_processes_run_uneven_batches() -> None:
    ends = endings(2, _in_processes)
    for ending in ends:
        assert ending.error is None, ending.text
    assert_same([pickle.loads(ending.result) for ending in ends], _uncut(PLAIN, (10, 8)))
