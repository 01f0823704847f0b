from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import partita
from partita._torch.export import conditions
from partita._torch.export.conditions import Answers
from partita.capture import capture
from partita.capture.merging.branches import MOST_WAYS
from partita.capture.open_sizes.sizes import Sizes
from partita.errors import ExecutionError
from partita.graph.effect_rules.conditions import OnlyIf, choose, require_condition
from partita.graph.effects import analyse
from partita.pipelining import SplitPoint, pipeline


class Masked(nn.Module):
    """Drops a mask that hides nothing when it runs, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        bias = None
        if not mask.all():
            hidden = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask == 0, float("-inf"))
            bias = hidden[:, None, :].expand(-1, x.shape[1], -1)
        for _ in range(2):
            h = self.project(x)
            x = self.drop(functional.scaled_dot_product_attention(h, h, h, bias, is_causal=bias is None)) + x
        return {"x": x}


class Clamped(nn.Module):
    """Asks so many times for something that it computes itself."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.a, self.b, self.times = nn.Linear(4, 4), nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            h = self.a(x)
            if self.training and not torch.isfinite(h).all():
                h = h.clamp(-1e4, 1e4)
            x = self.b(h)
        return x


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert (x > 0).all(), "x is positive"
        return x.log()


class Questions(nn.Module):
    """Asks so many independent questions."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        result = x
        for place in range(self.count):
            if x[0, place] > 0:
                result = result * (place + 2) - x
        return result


class Nested(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if (x > 0).all():
            if (y > 0).all():
                return x * y
            return x - y
        return x.exp() + y


class Twice(nn.Module):
    """Asks the same question twice."""

    def forward(self, x: Tensor) -> Tensor:
        first = x * 2 if x.sum() > 0 else x * 3
        return first + 1 if x.sum() > 0 else first - 1


class Draws(nn.Module):
    """Does more than to compute or write a value in one way."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if x.sum() > 0 else x * 2


class Writes(nn.Module):
    """Writes to a buffer in one way, and reads it in both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.count.add_(1).mul_(2)
        return x * self.count


class BuildsInPlace(nn.Module):
    """Fills in a tensor of its own in one way, and writes to it again behind the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        bias = None
        if not mask.all():
            bias = torch.zeros(mask.shape, dtype=x.dtype)
            bias.masked_fill_(mask == 0, -2.0)[:, 0].add_(torch.tensor(0.5))
        x = self.first(x)
        return self.last(x) if bias is None else self.last(x) + bias.mul_(3)[:, :, None]


def masks() -> dict[str, Tensor]:
    ones = torch.ones(2, 5, dtype=torch.long)
    padded = ones.clone()
    padded[0, 3:] = 0
    return {"ones": ones, "padded": padded}


@pytest.mark.parametrize("example", ["ones", "padded"])
def test_one_graph_takes_the_way_that_the_model_takes(example: str) -> None:
    model, x = Masked(), torch.randn(2, 5, 8)
    captured = capture(model, (x, masks()[example]))
    assert captured.both_modes
    for mask in masks().values():
        for training in (True, False):
            model.train(training)
            captured.module.train(training)
            partita.verify(captured.module, model, (x, mask)).check()
            partita.verify(captured.module, model, (torch.cat([x, x]), torch.cat([mask, mask]))).check()


def test_what_one_branch_alone_computes_is_not_computed_in_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ones = torch.randn(2, 5, 8), masks()["ones"]
    module = capture(Masked(), (x, ones)).module
    guarded = [node for node in module.graph.nodes if isinstance(node.target, OnlyIf)]
    assert any("expand" in node.name for node in guarded)
    attention = [node for node in module.graph.nodes if "scaled_dot" in node.name]
    assert len(attention) == 2  # one of each, with its arguments chosen
    ran = []
    for node in guarded:
        monkeypatch.setattr(node, "target", OnlyIf(lambda *_, **__: ran.append(1), node.target.truth))
    module.recompile()
    module(x, ones)
    assert not ran


def test_a_question_about_what_the_model_computes_is_answered_in_each_run() -> None:
    torch.manual_seed(0)
    model, x = Clamped(1), torch.randn(2, 4)
    captured = capture(model, (x,))
    assert captured.other is not None
    train = captured.module if captured.module.training else captured.other.module
    for sample in (torch.randn(2, 4), torch.full((2, 4), float("inf"))):
        partita.verify(train, model, (sample,)).check()


def test_many_questions_about_what_the_model_computes_are_checked_in_each_run() -> None:
    model, x = Clamped(4), torch.randn(2, 4)
    module = capture(model, (x,), modes="train").module
    partita.verify(module, model, (torch.randn(2, 4),)).check()
    with pytest.raises(
        ExecutionError, match=r"isfinite\(h\).*captured where it is True.*what the model computes"
    ):
        module(torch.full((2, 4), float("inf")))


def test_an_assertion_of_the_model_holds_in_the_graph() -> None:
    captured = capture(Asserts(), (torch.rand(2, 4) + 1,))
    partita.verify(captured.module, Asserts(), (torch.rand(2, 4) + 2,)).check()
    with pytest.raises(ExecutionError, match="x is positive"):
        captured.module(-torch.ones(2, 4))


def test_every_combination_of_a_few_questions_is_right() -> None:
    captured, model = capture(Questions(3), (torch.ones(2, 4),)), Questions(3)
    for number in range(8):
        signs = [1.0 if number >> place & 1 else -1.0 for place in range(3)]
        x = torch.tensor([[*signs, 1.0], [1.0, -1.0, 2.0, 3.0]])
        partita.verify(captured.module, model, (x,)).check()


def test_more_ways_than_are_traced_are_refused_in_the_run() -> None:
    captured, model = capture(Questions(5), (torch.ones(2, 6),)), Questions(5)
    partita.verify(captured.module, model, (torch.ones(3, 6),)).check()
    refused = 0
    for number in range(32):
        x = torch.tensor([[1.0 if number >> place & 1 else -1.0 for place in range(6)]] * 2)
        try:
            output = captured.module(x)
        except ExecutionError:
            refused += 1
        else:
            assert torch.equal(output, model(x))
    assert 0 < refused < 32
    with pytest.raises(ExecutionError, match=f"more than {MOST_WAYS} ways"):
        captured.module(torch.full((2, 6), -1.0))


def test_a_question_that_only_one_way_asks() -> None:
    captured = capture(Nested(), (torch.ones(2, 3), torch.ones(2, 3)))
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        for y in (torch.ones(2, 3), -torch.ones(2, 3)):
            partita.verify(captured.module, Nested(), (x, y)).check()


def test_the_same_question_is_asked_once() -> None:
    captured = capture(Twice(), (torch.ones(2, 3),))
    assert [node.name for node in captured.module.graph.nodes].count("condition") == 1
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        partita.verify(captured.module, Twice(), (x,)).check()


def test_what_draws_in_one_way_is_kept_for_that_way_only() -> None:
    model = Draws()
    captured = capture(model, (torch.ones(2, 3),))
    partita.verify(captured.module, model, (torch.rand(2, 3),)).check()
    checks = [node for node in captured.module.graph.nodes if node.target is require_condition]
    assert len(checks) == 1
    with pytest.raises(ExecutionError, match="only one of the two ways has 'rand_like'"):
        captured.module(-torch.ones(2, 3))


@pytest.mark.parametrize("example", [1.0, -1.0])
def test_a_way_may_write_to_a_buffer(example: float) -> None:
    """Both ways read the buffer itself, whether it was written to or not, so nothing is chosen."""
    captured = capture(Writes(), (torch.full((2, 3), example),))
    assert not [node for node in captured.module.graph.nodes if node.target is choose]
    for sign in (1, -1):
        partita.verify(captured.module, Writes(), (torch.rand(2, 3) * sign,)).check()


@pytest.mark.parametrize("example", ["ones", "padded"])
def test_a_way_may_write_to_what_it_has_made(example: str) -> None:
    """Such a model was held to the way of its example; and each stage has its part of that way."""
    torch.manual_seed(0)
    model, x = BuildsInPlace(), torch.randn(2, 5, 8)
    pipe = pipeline(model, (x, masks()[example]), split_spec={"first": SplitPoint.END})
    effects = analyse(pipe.whole)
    assert sum(isinstance(effects.nodes[position].target, OnlyIf) for position in effects.writers) >= 3
    for mask in masks().values():
        partita.verify(pipe, model, (x, mask)).check()


def test_sizes_that_one_way_makes_equal_are_equal_in_the_graph() -> None:
    captured = capture(Masked(), (torch.randn(2, 5, 8), masks()["ones"]))
    assert [symbol.name for symbol in Sizes.of(captured.module).symbols] == ["batch"]


def test_answers_are_as_planned_and_then_false() -> None:
    answers = Answers([True])
    assert [answers.answer("a"), answers.answer("b")] == [True, False]
    assert answers.places == ["a", "b"]


class Packed(nn.Module):
    """Asks about positions that it makes itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        if (positions.sum() < 9000).all():
            return self.project(x)
        return 2 * self.project(x)


def test_a_question_about_sizes_only_is_not_traced_both_ways(traces: list[bool]) -> None:
    model = Packed()
    module = capture(model, (torch.randn(2, 4),), prove=True).module
    assert len(traces) == 1  # which serves both modes
    for batch in (1, 50):
        x = torch.randn(batch, 4)
        assert torch.equal(module(x), model(x))
    with pytest.raises(ExecutionError, match="depends on sizes only"):
        module(torch.randn(1500, 4))  # 1500 * (0 + 1 + 2 + 3) is 9000


class Constants(nn.Module):
    """Makes constants before the question, and in both ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.tensor([1.0, float("nan"), 3.0]).nan_to_num()
        if (x > 0).all():
            return x + torch.tensor([4.0, 5.0, 6.0])
        return x - torch.tensor([7.0, 8.0, 9.0]) * torch.tensor([1.0, float("nan"), 3.0]).nan_to_num()


def test_constants_that_each_trace_makes_anew_are_the_same() -> None:
    model = Constants()
    module = capture(model, (torch.ones(2, 3),), prove=True).module
    for x in (torch.ones(2, 3), -torch.ones(4, 3)):
        assert torch.equal(module(x), model(x))


class SameConstant(nn.Module):
    """Makes constants of one value, so many before the question, in each way, and one behind it."""

    def __init__(self, before: int, ways: tuple[int, int]) -> None:
        super().__init__()
        self.before, self.ways = before, ways

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        for _ in range(self.before):
            h = h.maximum(torch.tensor(-1.0))
        for number in range(self.ways[1] if (x > 0).all() else self.ways[0]):
            h = (h + number) * torch.tensor(-1.0)
        return h + torch.tensor(-1.0)


@pytest.mark.parametrize("ways", [(0, 1), (1, 0), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_way_may_make_a_constant_that_has_a_value_of_others(before: int, ways: tuple[int, int]) -> None:
    model = SameConstant(before, ways)
    for example in (torch.ones(2, 3), -torch.ones(2, 3)):
        module = capture(model, (example,), prove=True).module
        assert not module.graph.find_nodes(op="call_function", target=require_condition)
        for x in (torch.ones(2, 3), -torch.ones(4, 3)):
            assert torch.equal(module(x), model(x))


class Bodies(nn.Module):
    """Each way has graphs of its own, which torch.cond runs."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if (x > 0).all() else 3.0
        return torch.cond(x.sum() > 4, lambda y: y * factor, lambda y: y + 1, (x,))


def test_ways_with_other_graphs_inside_run_their_own() -> None:
    """They have the same names in both traces, and were taken for the same: one way ran the other one's."""
    kinds = [torch.ones(2, 3), torch.ones(1, 3) * 0.1, torch.tensor([[-1.0, 9.0, 1.0]]), -torch.ones(2, 3)]
    for example in (kinds[0], kinds[3]):
        module = capture(Bodies(), (example,), prove=True).module
        assert not module.graph.find_nodes(op="call_function", target=require_condition)
        for x in kinds:
            assert torch.equal(module(x), Bodies()(x))


@pytest.mark.parametrize("example", ["ones", "padded"])
def test_each_way_is_traced_once_a_mode(example: str, traces: list[bool]) -> None:
    mask = torch.ones(2, 3).tril(int(example == "ones") * 9)
    capture(Masked(), (torch.randn(2, 3, 8), mask))
    assert len(traces) == 4


class Padded(nn.Module):
    """Asks as decoders of Hugging Face do, and computes the same in both modes."""

    def __init__(self, asks_hidden: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.asks_hidden = asks_hidden

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length = x.shape[1]
        h = self.project(x)
        if self.asks_hidden and h.isinf().any():
            h = h.clamp(-9, 9)
        if mask.all():
            return h
        if mask[:, :length].all() and (~mask[:, length:]).all():
            return h * 2
        return h * mask[:, :length, None]


@pytest.mark.parametrize("asks_hidden", [False, True])
def test_ways_that_are_the_same_in_both_modes_are_traced_once(asks_hidden: bool, traces: list[bool]) -> None:
    model, x = Padded(asks_hidden), torch.randn(2, 5, 4)
    mask = torch.ones(2, 5, dtype=torch.bool)
    captured = capture(model, (x, mask), prove=True)
    # what the example answers about hidden values may be another answer in evaluation; the second question is
    # the first one again, and the third is about nothing
    first_guess = 1
    assert len(traces) - first_guess == (3 if asks_hidden else 1)
    mask[0, 3:] = False
    for training in (True, False):
        model.train(training)
        captured.module.train(training)
        for given in (mask, torch.ones_like(mask)):
            partita.verify(captured.module, model, (x, given)).check()


def test_numbers_that_one_trace_works_out_earlier_are_the_same() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'partita[hf]'")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=32, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    ids, mask = torch.arange(16).view(2, 8), torch.ones(2, 8, dtype=torch.long)
    graphs = capture(model, (), {"input_ids": ids, "attention_mask": mask}).graphs()
    padded = mask.clone()
    padded[0, 5:] = 0
    for training, module in graphs.items():
        for given in (mask, padded):
            example = {"input_ids": ids, "attention_mask": given}
            partita.verify(module.train(training), model.train(training), (), example).check()


def test_on_meta_a_model_has_the_ways_that_it_has_with_data() -> None:
    model, x, mask = Padded(), torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    names = []
    for device in ("cpu", "meta"):
        args = (x.to(device), mask.to(device))
        module = capture(copy.deepcopy(model).to(device), args, dynamic_shapes=False).module
        targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
        plain = [target.target if isinstance(target, OnlyIf) else target for target in targets]
        # without the answer of the example
        names.append(sorted(str(target).partition("(")[0] for target in plain))
    assert names[0] == names[1]


class WritesBetween(nn.Module):
    """Asks the same of what has been written to since."""

    def forward(self, x: Tensor) -> Tensor:
        seen = x.clone()
        scale = 2 if (seen > 0).all() else 3
        seen[:, 1:].neg_()
        return seen * scale * (5 if (seen > 0).all() else 7)


def test_a_question_about_what_was_written_since_is_another_one() -> None:
    model = WritesBetween()
    module = capture(model, (torch.ones(2, 3),), prove=True).module
    for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.tensor([[1.0, -1.0, -1.0]])):
        assert torch.equal(module(x), model(x))


class Unshared(nn.Module):
    """What it makes before the question, one way does not use; equal kinds stand next to each other."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.arange(x.shape[1]), torch.arange(3, 3 + x.shape[1])
        if (x > 0).all():
            return x * columns
        return x * rows + columns


def test_what_one_way_does_not_use_shifts_nothing() -> None:
    model = Unshared()
    module = capture(model, (torch.ones(2, 3),), prove=True).module
    assert not module.graph.find_nodes(op="call_function", target=require_condition)
    for x in (torch.ones(2, 3), -torch.ones(4, 3)):
        assert torch.equal(module(x), model(x))


class TwoBatches(nn.Module):
    """Writes in place before the question; one way joins two inputs, and with them their batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        window = x.new_zeros(x.shape[0], 4)
        window[:, :2].copy_(self.first(x)[:, :2])
        x, y = self.second(window), self.first(y)
        return (x, y) if mask.all() else (x * mask, y * mask)


def test_a_size_is_the_same_whichever_input_a_way_reads_it_from() -> None:
    model = TwoBatches()
    ones = torch.ones(3, 1)
    padded = ones.tril(-1)
    x, y = torch.randn(2, 3, 4)
    module = capture(model, (x, y, padded), prove=True).module
    assert not module.graph.find_nodes(op="call_function", target=require_condition)
    for mask in (ones, padded):
        for mine, theirs in zip(module(x, y, mask), model(x, y, mask), strict=True):
            assert torch.equal(mine, theirs)


class Grouped(nn.Module):
    """Attention with fewer keys than queries, which are repeated where there is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        key = self.key(x).unsqueeze(1)
        if mask.all():
            attended = functional.scaled_dot_product_attention(query, key, key, None, 0.1, enable_gqa=True)
        else:
            key = key.repeat_interleave(2, 1)
            attended = functional.scaled_dot_product_attention(query, key, key, mask[:, None, None], 0.1)
        return attended.transpose(1, 2).flatten(2)


def test_an_argument_that_one_way_leaves_out_has_its_default_there() -> None:
    model = Grouped()
    x, ones = torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
    padded = ones.clone()
    padded[1, 2] = False
    module = capture(model, (x, padded), prove=True).module
    assert not module.graph.find_nodes(op="call_function", target=require_condition)
    for mask in (ones, padded):
        for training in (True, False):
            model.train(training)
            module.train(training)
            torch.manual_seed(0)
            expected = model(x, mask)
            torch.manual_seed(0)
            assert torch.equal(module(x, mask), expected)


class FirstBatch(nn.Module):
    """Takes its offset from its first batch, as layers of normalising flows and observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            with torch.no_grad():
                self.offset.copy_(x.mean(0))
                self.ready.fill_(True)
        return self.linear(x - self.offset)  # type: ignore[no-any-return]


def test_a_branch_of_the_first_call_is_refused_until_the_model_was_called() -> None:
    """The message knew no way but the other frontend."""
    model, x = FirstBatch(), torch.randn(3, 4)
    message = r"keeps from call to call \('ready'\)\. Where .* in the first call only, call the model once"
    graph = capture(model, (x,), prove=True).module.train()
    graph(x)
    with pytest.raises(ExecutionError, match=message):
        graph(x)
    model.train()(x)
    graph = capture(model, (x,), prove=True).module
    partita.verify(graph, model, (torch.randn(3, 4),)).check()


class Halved(nn.Module):
    """Loops until its data are small, as solvers with a step size and layers with a fixed point do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        while not x.abs().max() < 0.3:
            x = x * 0.5
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_loop_that_has_no_end_without_data_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round asked once more, was answered False, and capture never came back."""
    monkeypatch.setattr(conditions, "MOST_ASSUMED", 5)
    model, x = Halved(), torch.full((2, 4), 1.0)
    graph = capture(model, (x,), prove=True).module
    for size in (0.1, 0.5, 1.0):
        partita.verify(graph, model, (x * size,)).check()
    with pytest.raises(ExecutionError, match=r"the loop around while not x.abs.* for more than 5 rounds"):
        graph(x * 1e6)
