"""``partita verify``: a model, cut or compiled, compared with itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.options.model_options import Architecture, ConfigJson, Dtype, ModelType, Overrides
from partita.cli.options.schedule_names import complete_schedule
from partita.errors import UsageError

if TYPE_CHECKING:
    from partita.cli.verifying.verify_checks import VerifyCheck

__all__ = ["verify"]

_BACKENDS = ("aot_eager", "inductor")
_TOKENS = 64
"""So many of a sample where ``--sequence`` is not given: enough for a comparison."""


def _complete_backend(incomplete: str) -> list[str]:
    return [name for name in _BACKENDS if name.startswith(incomplete)]


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            help="FILE.py:NAME, a function that returns (model, args) or (model, args, kwargs); hf:TYPE or "
            "hf:FOLDER with a config.json."
        ),
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Into how many stages to cut (default: 2).")] = None,
    split_at: Annotated[
        list[str] | None,
        typer.Option(help="In place of it: a module at which a stage begins; can be given again."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="The schedule of the step (default: 1F1B).", autocompletion=complete_schedule),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches of the step; 0 for none (default: 4).")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--compile",
            help="Compare torch.compile with eager instead: aot_eager, or inductor.",
            autocompletion=_complete_backend,
        ),
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(help="With --compile: relative tolerance (inductor: by the dtype).")
    ] = None,
    atol: Annotated[
        float | None, typer.Option(help="With --compile: absolute tolerance (inductor: by the dtype).")
    ] = None,
    config_json: ConfigJson = None,
    model_type: ModelType = None,
    set_: Overrides = None,
    architecture: Architecture = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a microbatch (default: 2).")] = None,
    sequence: Annotated[int | None, typer.Option(help=f"Tokens of a sample (default: {_TOKENS}).")] = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Compare a model that is cut into stages with itself uncut, bit for bit.

    Compared are forward, gradients and buffers, in training and in evaluation mode, and a training step under
    a schedule with all ranks in this process. The exit status is 0 where all is equal and 1 where not.

    \b
    partita verify model.py:build  # two stages
    partita verify model.py:build --split-at layers.4 --split-at head --schedule GPipe
    partita verify model.py:build --stages 4 --schedule ZBVZeroBubble --microbatches 8
    partita verify hf:gpt2 --set n_layer=2 --set n_embd=64 --set n_head=2 --dtype float32
    partita verify model.py:build --compile aot_eager  # does torch.compile change what the model does?
    """
    from partita.cli.models.model_source import choose_source
    from partita.cli.verifying.run_checks import compile_checks, cut_checks, cut_options

    source = choose_source(
        model,
        config_json,
        model_type,
        tuple(set_ or ()),
        architecture,
        _hugging_face_default(model, batch, 2),
        sequence,
        dtype,
        longest=_TOKENS,
    )
    if backend is None:
        for option, value in (("--rtol", rtol), ("--atol", atol)):
            if value is not None:
                raise UsageError(f"{option} is {value}, but stages are compared bit for bit: leave it out")
        cut, order = cut_options(stages, split_at, schedule, microbatches)
        checks = cut_checks(source, cut, order)
        title = f"{source.title}, {cut.number} {'stage' if cut.number == 1 else 'stages'}"
    else:
        of_cuts = {"--stages": stages, "--split-at": split_at or None, "--schedule": schedule}
        for name, cut_value in {**of_cuts, "--microbatches": microbatches}.items():
            if cut_value is not None:
                raise UsageError(f"{name} is given with --compile, which cuts nothing: leave one of them out")
        tolerance = _compile_options(backend, rtol, atol)
        checks = compile_checks(source, backend, tolerance)
        title = f"{source.title}, torch.compile with {backend}"
    _show(title, list(checks), as_json)


def _hugging_face_default(model: str | None, value: int | None, default: int) -> int | None:
    return default if value is None and (model is None or model.startswith("hf:")) else value


def _compile_options(backend: str, rtol: float | None, atol: float | None) -> tuple[float, float] | None:
    if backend not in _BACKENDS:
        raise UsageError(f"--compile is {backend!r:.40}: give {' or '.join(_BACKENDS)}")
    for option, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not 0 <= value < 1:
            raise UsageError(f"{option} is {value}: give a number from 0 to 1, such as 1e-5")
    return None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)


def _show(title: str, checks: list[VerifyCheck], as_json: bool) -> None:
    """Print the outcome; the exit status says it too."""
    equal = all(check.equal for check in checks)
    if as_json:
        answer = {"title": title, "equal": equal, "checks": [check.as_dict() for check in checks]}
        print(json.dumps(answer, indent=2))
    else:
        print(title)
        for check in checks:
            print(f"{check.name}: {check.text}")
        different = [check.name for check in checks if not check.equal]
        print("equal" if equal else f"different in {', '.join(different)}")
    if not equal:
        raise typer.Exit(1)
