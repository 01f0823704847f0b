"""How stages are compiled."""

from __future__ import annotations

import pytest

from partita.errors import ArgumentError
from partita.pipelining.interface.compile_options import CompileOptions, compile_options
from partita.runtime import PlainRunner


def test_what_says_how_to_compile() -> None:
    assert compile_options(None) is compile_options(False) is None
    assert compile_options(True) == CompileOptions("inductor")
    assert compile_options("aot_eager") == CompileOptions("aot_eager")
    assert compile_options({"backend": "aot_eager", "dynamic": True}) == CompileOptions(
        "aot_eager", dynamic=True
    )
    options = CompileOptions("aot_eager")
    assert compile_options(options) is options


def test_equal_options_share_what_they_compile_and_a_piece_runner_nothing() -> None:
    assert (
        CompileOptions(options={"max_autotune": True}).key
        == CompileOptions(options={"max_autotune": True}).key
    )
    assert CompileOptions().key != CompileOptions("aot_eager").key
    assert CompileOptions().shares
    assert not CompileOptions(PlainRunner()).shares


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ArgumentError, match="backend is 'inductor', 'aot_eager', a PieceRunner"):
        compile_options("cudagraphs")
    with pytest.raises(ArgumentError, match="compile has 'fullgraph': it takes backend, mode"):
        compile_options({"fullgraph": True})
    with pytest.raises(ArgumentError, match="are Inductor's, and backend is 'aot_eager': leave out 'mode'"):
        CompileOptions("aot_eager", mode="max-autotune")
    with pytest.raises(ArgumentError, match="CudaGraphsRunner"):
        CompileOptions(mode="reduce-overhead")
    with pytest.raises(ArgumentError, match=r"list_options\(\)"):
        CompileOptions(options={"no_such_option": 1})
