"""What ``partita verify`` says of a pipe that does something else than its model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.cli.models.user_file import Built
from partita.cli.verifying.verify_checks import compare_compiled, compare_cut
from partita.pipelining import SplitPoint, pipeline


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())


def test_a_difference_names_the_piece_and_the_node() -> None:
    built = Built(_model(), (torch.randn(2, 4),))
    pipe = pipeline(built.model, built.args, split_spec={"2": SplitPoint.BEGINNING})
    assert compare_cut(pipe, built, training=True).equal
    graph_module = pipe.get_stage_module(1)
    (tanh,) = [node for node in graph_module.graph.nodes if "tanh" in str(node.target)]
    tanh.target = torch.ops.aten.sigmoid.default
    graph_module.recompile()
    check = compare_cut(pipe, built, training=False)
    assert not check.equal
    assert (check.name, check.differences[0].piece, check.differences[0].node) == (
        "evaluation mode",
        "submod_pp_1",
        "tanh",
    )
    assert "first seen at node tanh in piece submod_pp_1" in check.text
    assert check.as_dict()["differences"][0]["node"] == "tanh"


def test_a_graph_that_is_not_the_model_is_told_from_a_wrong_cut() -> None:
    built = Built(_model(), (torch.randn(2, 4),))
    pipe = pipeline(built.model, built.args, stages=2)
    built.model[1] = nn.Sigmoid()
    check = compare_cut(pipe, built, training=True)
    assert not check.equal
    assert "the stages do what the captured graph does: the graph is not the model" in check.text


class _Shows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.a(x)
        return self.b(self.shown)


def test_what_the_stages_do_not_keep_is_said() -> None:
    built = Built(_Shows(), (torch.randn(2, 4),))
    pipe = pipeline(built.model, built.args, stages=2)
    check = compare_cut(pipe, built, training=True)
    assert check.equal
    assert check.as_dict()["left_out"] == ("attribute shown",)
    assert "not kept by the candidate, as it says: attribute shown" in check.text


def test_inductor_is_compared_within_the_tolerance_of_the_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    built = Built(model, (torch.randn(2, 4, dtype=torch.float64),))
    check = compare_compiled(built, training=True, backend="inductor", tolerance=None)
    assert check.text.startswith("equal within rtol=1e-07, atol=1e-07")
    assert compare_compiled(built, True, "aot_eager", None).text.startswith("equal bit for bit")
