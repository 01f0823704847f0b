"""How stages are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from partita._torch.compile.inductor import draws_own_numbers
from partita.errors import ArgumentError
from partita.runtime import PieceRunner
from partita.runtime.graph_compiler import InnerCompiler, check_inner, inductors_settings
from partita.runtime.piece_runner import ReceiveMemory, RunnerWithMemory

__all__ = ["CompileArgument", "CompileOptions", "compile_options"]

_NO_CUDA_GRAPHS = (
    "Inductor's CUDA graphs keep one microbatch's values at a time, and a stage has several in flight: pass "
    "backend=partita.cudagraphs.CudaGraphsRunner(), or mode='max-autotune-no-cudagraphs'"
)


@dataclass(frozen=True)
class CompileOptions:
    """What a stage is compiled with.

    Attributes:
        backend: see `partita.runtime.graph_compiler.InnerCompiler`.
        mode: of Inductor, as ``torch.compile`` takes it.
        options: of Inductor.
        dynamic: as ``torch.compile`` takes it: whether sizes are compiled as symbols. None: those that
            change.
    """

    backend: InnerCompiler = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        check_inner(self.backend, "backend")
        self.settings()

    def settings(self) -> dict[str, Any]:
        """Inductor's configuration for them.

        Raises:
            ArgumentError: Inductor does not know them, they are for another backend, or they ask for CUDA
                graphs.
        """
        return inductors_settings(
            self.backend,
            self.mode,
            self.options,
            name="backend",
            no_cuda_graphs=_NO_CUDA_GRAPHS,
        )

    @property
    def draws_other_numbers(self) -> bool:
        """Whether a compiled stage draws other random numbers than the same stage uncompiled."""
        return self.backend == "inductor" and draws_own_numbers(self.settings())

    @property
    def shares(self) -> bool:
        """Whether what is compiled for one stage may serve another. What a `PieceRunner` makes is bound to
        its place: a recording to its parameters.
        """
        return not isinstance(self.backend, PieceRunner)

    def input_memory(self) -> ReceiveMemory | None:
        """Memory for what one stage receives; None where any will do."""
        return self.backend.input_memory() if isinstance(self.backend, RunnerWithMemory) else None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal options."""
        backend = self.backend if isinstance(self.backend, str) else id(self.backend)
        return backend, self.mode, repr(sorted(self.options.items())), self.dynamic


CompileArgument: TypeAlias = "CompileOptions | InnerCompiler | Mapping[str, Any] | bool | None"
"""What says how stages are compiled; see `compile_options`."""


def compile_options(value: CompileArgument) -> CompileOptions | None:
    """What ``pipeline(..., compile=...)`` was given: options, a backend, True for the defaults, or False or
    None.

    Raises:
        ArgumentError: something else, or an unknown backend.
    """
    if value is None or value is False:
        return None
    if isinstance(value, CompileOptions):
        return value
    if isinstance(value, Mapping):
        unknown = value.keys() - {"backend", "mode", "options", "dynamic"}
        if unknown:
            raise ArgumentError(
                f"compile has {sorted(unknown)[0]!r}: it takes backend, mode, options and dynamic, as "
                "Stage.compile does"
            )
        return CompileOptions(**value)
    return CompileOptions() if value is True else CompileOptions(value)
