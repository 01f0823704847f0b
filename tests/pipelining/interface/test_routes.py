from __future__ import annotations

import pytest
import torch
from tests.pipelining.models import PLAIN, SKIP, TRANSFORMER
from tests.pipelining.running import cut
from torch.utils import _pytree as pytree

from partita._torch.export.signature import Signature
from partita.errors import SignatureMismatch
from partita.pipelining.interface.routes import Named, StageBorder, make_routes
from partita.pipelining.interface.values import Constant, Value, accept

ONE = Signature(pytree.tree_structure(((0,), {})), pytree.tree_structure(0), ("x",))


def _routes() -> object:
    tensor = torch.empty(2, requires_grad=True)
    return make_routes(
        [StageBorder((), ("h",)), StageBorder(("h",), ("k",)), StageBorder(("k",), ("m",)), StageBorder(("h",
        "m"), ("o",))], {"h": 0, "k": 1, "m": 2, "o": 3, "x": 0},
        {"h": tensor, "k": tensor, "m": torch.empty(3, dtype=torch.int64), "o": tensor, "x": torch.empty(1)},
        [Value.of("x", torch.empty(1))],
        [Named("o"), Named("x"), None],
    )  # fmt: skip


def test_values_go_straight_to_their_users_and_gradients_back_along_the_chain() -> None:
    routes = _routes()
    assert routes.forward == {(0, 1): ("h",), (0, 3): ("h", "x"), (1, 2): ("k",), (2, 3): ("m",)}
    assert routes.backward == {(1, 0): ("h",), (2, 1): ("k",), (3, 1): ("h",)}
    assert routes.edges == {(0, 1), (0, 3), (1, 2), (2, 3), (1, 3)}
    assert routes.result_names == ("o", "x")


def test_each_message_has_a_tag_of_its_own() -> None:
    routes = cut(SKIP, 4).routes
    assert len(set(routes.tags.values())) == len(routes.tags)


def test_the_gradient_of_a_tied_parameter_travels_like_that_of_a_value() -> None:
    routes = cut(TRANSFORMER, 3).routes
    (tied,) = routes.tied
    assert set(tied.names) == {"embedding.weight", "head.weight"}
    assert tied.stages == (0, 2)
    assert tied.value.name in routes.backward[2, 0]


def test_equal_cuts_have_equal_descriptions_and_other_shapes_another() -> None:
    assert cut(PLAIN, 2).routes.describe() == cut(PLAIN, 2).routes.describe()
    assert cut(PLAIN, 2).routes.describe() == cut(PLAIN, 2, samples=4).routes.describe()  # the batch is open
    fixed = [cut(PLAIN, 2, samples, dynamic_shapes=False).routes.describe() for samples in (2, 4)]
    assert fixed[0] != fixed[1]
    assert cut(PLAIN, 2).routes.describe() != cut(PLAIN, 3).routes.describe()


def test_the_order_of_a_set_is_not_part_of_the_description() -> None:
    """Each process has its own order of strings: ranks refused each other's stages, now and then."""
    names = [f"value_{number}" for number in range(20)]
    pairs = [(one, other) for one in names for other in names if one != other]
    one, other = next(pair for pair in pairs if [*frozenset(pair)] != [*frozenset(reversed(pair))])

    def text(*order: str) -> str:
        first = StageBorder((), (one, other), reused=frozenset(order))
        last = StageBorder((one, other), (), written=frozenset(order))
        values = dict.fromkeys((one, other), torch.empty(1))
        return make_routes([first, last], dict.fromkeys(values, 0), values, [], []).describe()

    assert text(one, other) == text(other, one)


@pytest.mark.parametrize(
    ("expected", "value", "text"),
    [
        (
            Value("x", (2,), torch.float32, False),
            torch.ones(3),
            r"me brings float32\[3\] for x: float32\[2\]: give",
        ),
        (
            Value("x", (2,), torch.float32, True),
            torch.ones(2).half(),
            r"float16\[2\] for x: float32\[2\], with grad",
        ),
        (Value("x", (2,), torch.float32, False), None, "me brings NoneType for x"),
        (Constant("n", 3), 4, "me brings 4 for n = 3: give what the model was captured with"),
        (Constant("n", 1), True, "me brings True for n = 1"),
        (Constant("n", None), torch.ones(1), "for n = None"),
    ],
)
def test_other_inputs_are_refused(expected: Value | Constant, value: object, text: str) -> None:
    with pytest.raises(SignatureMismatch, match=text):
        accept([expected], [value], "me", ONE)


def test_the_number_of_inputs_is_checked() -> None:
    with pytest.raises(SignatureMismatch, match="the model takes 0 inputs, me brings 1"):
        accept([], [1], "me", ONE)
    accept([Constant("n", "sum")], ["sum"], "me", ONE)
