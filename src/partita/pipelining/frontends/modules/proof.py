"""The proof of a pipe whose stages run the model's own code: pipe and model are run and compared.

Such a pipe computes what the model's code computes, but each stage has its own copy of the model's
attributes: one that a later stage changes and an earlier one reads differs. So several calls follow one
another, as they do in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, tree_map
from partita._torch.tensors.storage import storage_key
from partita._torch.tensors.subclasses import innermost_tensors
from partita._torch.tensors.versions import times_written
from partita.capture.merging.modes import in_mode
from partita.capture.one_thread_at_a_time import one_thread_at_a_time
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.proving.grad_modes import (
    FAST_PATH_ADVICE,
    GradModeDifference,
    differ_by_fast_path,
    explained,
)
from partita.capture.proving.proof import CLOSE, Proof, without_values
from partita.capture.proving.samples import Sample, samples
from partita.errors import CaptureError, ExecutionError, PartitaError
from partita.pipelining.frontends.modules.pipe import ModulePipe
from partita.pipelining.frontends.modules.recording import fresh_leaf, written_parameter
from partita.pipelining.frontends.modules.twin import own_parameters, twin_of
from partita.verification.comparing.compare import EXACT, Tolerance, compare_tensors
from partita.verification.observing import randomness, snapshot
from partita.verification.observing.subject import subject_of

__all__ = ["block_proof", "check_against_model"]

_CALLS = 2


@one_thread_at_a_time()
def block_proof(
    pipe: ModulePipe,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modes: Iterable[bool],
    tolerance: Tolerance,
) -> Proof:
    """Run `check_against_model` on the example and on other samples of its kind, in each mode.

    Another sample proves nothing if the model itself raises on it or differs from itself, or if the pipe
    refuses it because it needs a value that the example did not need. Where the model raises on the example,
    once it is called again, or two runs of it differ, nothing is proven, nor where a tensor has no memory.

    Raises:
        CaptureError: they differ, or the pipe refuses the example.
    """
    if reason := without_values(model, args, kwargs):
        return Proof(False, reason)
    proven: list[str] = []
    unkept: dict[str, None] = {}
    apart: list[GradModeDifference] = []
    modes = sorted(modes, reverse=True)
    for training in modes:
        for number, sample in enumerate(samples(args, kwargs, Sizes(), [])):
            outcome = _equal_on(pipe, model, sample, training, tolerance, unkept)
            if isinstance(outcome, Sample):
                proven.append(outcome.kind)
                differs = None if training else _without_gradients(pipe, model, outcome, tolerance)
                apart += [] if differs is None else [differs]
            elif number == 0:
                mode = "training" if training else "evaluation"
                if isinstance(outcome, ExecutionError):
                    raise CaptureError(
                        f"cut at its blocks, {type(model).__name__} does not run in {mode} on its own "
                        f"example: {outcome}"
                    ) from outcome
                return Proof(False, f"on its own example, in {mode}, {outcome}")
    exact = "bit for bit" if tolerance.exact else f"within rtol={tolerance.rtol:g}, atol={tolerance.atol:g}"
    ran = " and ".join("training" if training else "evaluation" for training in modes)
    kinds = ", ".join(dict.fromkeys(proven))
    gravest = min(apart, key=lambda one: one.rounding, default=None)
    if gravest is not None and not gravest.rounding:
        raise CaptureError(gravest.text)
    text = f"equal to the eager model {exact} in {ran} on {kinds}"
    return Proof(True, text, tuple(unkept), gravest.text if gravest else "")


def _equal_on(
    pipe: ModulePipe,
    model: nn.Module,
    sample: Sample,
    training: bool,
    tolerance: Tolerance,
    unkept: dict[str, None],
) -> Sample | _NotTakenError | ExecutionError:
    """Return the sample if both are equal on it, or the gentle one; why not if it proves nothing.

    Args:
        unkept: gets the names of attributes that the model sets and the stages do not hold.
    """

    def check() -> None:
        names = check_against_model(
            pipe, model, sample.args, sample.kwargs, training=training, tolerance=tolerance
        )
        unkept.update(dict.fromkeys(names))

    try:
        check()
    except CaptureError as error:
        if differ_by_fast_path(model, lambda: _passes(check)):
            raise CaptureError(f"{str(error).split('. ', 1)[0]}: {FAST_PATH_ADVICE}") from error
        raise
    except _NotTakenError as error:
        gentle = sample.gentle
        return _equal_on(pipe, model, gentle, training, tolerance, unkept) if gentle else error
    except ExecutionError as error:
        return error
    return sample


def _passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except (CaptureError, ExecutionError, _NotTakenError):
        return False
    return True


def _without_gradients(
    pipe: ModulePipe, model: nn.Module, sample: Sample, tolerance: Tolerance
) -> GradModeDifference | None:
    """Compare in evaluation under ``torch.no_grad()``; both are equal on the sample with gradients."""

    def compare(within: Tolerance) -> str:
        try:
            check_against_model(
                pipe, model, sample.args, sample.kwargs, training=False, tolerance=within, gradients=False
            )
        except (CaptureError, ExecutionError) as error:
            return str(error).split(". ", 1)[0]
        except _NotTakenError:
            pass  # the model itself can't run without gradients
        return ""

    advice = 'cut it for training alone: modes="train"'
    return explained(type(model).__name__, model, compare, tolerance, CLOSE, advice)


class _NotTakenError(Exception):
    """The model itself raises on these arguments, or gives something else each time."""


def check_against_model(
    pipe: ModulePipe,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    tolerance: Tolerance = EXACT,
    gradients: bool = True,
) -> tuple[str, ...]:
    """Call both twice with these arguments, and compare outputs, gradients, buffers and random states.

    ``model``, ``pipe`` and the generators stay unchanged.

    Args:
        gradients: whether there are any, or both run under ``torch.no_grad()``.

    Returns:
        The names of the attributes that the model sets and the stages do not hold.

    Raises:
        CaptureError: they differ; names the first difference, or what the cut model raises.
        _NotTakenError: the model itself raises, or two runs of it differ wherever the two do.
    """
    names = [name for name, _ in model.named_parameters()]
    mine, its = own_parameters(model), own_parameters(model)
    eager, cut = twin_of(model, its), copy.deepcopy(pipe, dict[int, Any](mine))
    eager_parameters, cut_parameters = (dict(zip(names, own.values(), strict=True)) for own in (its, mine))
    with randomness.preserved(), in_mode(eager, training), torch.set_grad_enabled(gradients):
        cut.train(training)
        for call in range(_CALLS):
            try:
                expected = _call(eager, eager_parameters, args, kwargs, call)
            except Exception as error:  # whatever the user's model raises
                what = f"the model itself raises {type(error).__name__} in call {call + 1}: {error}"
                raise _NotTakenError(what) from error
            _check_parameters(model, its)
            try:
                observed = _call(cut, cut_parameters, args, kwargs, call)
            except PartitaError:
                raise
            except Exception as error:  # whatever the user's model raises
                raise _raises_when_cut(type(model).__name__, error, training=training) from error
            differing = _differing(observed, expected, tolerance)
            if differing:
                again = _eager_call(model, args, kwargs, call, training=training)
                if set(differing) <= set(_differing(again, expected, tolerance)):
                    raise _NotTakenError(f"two runs of the model itself differ in {differing[0]}")
                raise _not_the_same(type(model).__name__, differing[0], call, training=training)
            _compare_buffers(cut, eager, type(model).__name__, tolerance)
    return _unkept(model, eager, cut)


def _unkept(model: nn.Module, eager: nn.Module, cut: nn.Module) -> tuple[str, ...]:
    """The attributes that calls of ``eager``, a copy of the model, have set, and that ``cut`` has not."""
    before, after = _attributes(model), _attributes(eager)
    of_stages = {path.split(".", 2)[-1] for path in _attributes(cut)}  # split_gm.submod_pp_<i>.<its name>
    return tuple(
        name
        for name, value in after.items()
        if name not in of_stages and not (name in before and _same(value, before[name], EXACT))
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    subject = subject_of(module)
    tensors = snapshot.named_tensors(subject).items()
    return {name: one.tensor for name, one in tensors if one.kind == "attribute"} | snapshot.named_values(
        subject
    )


def _raises_when_cut(name: str, error: Exception, *, training: bool) -> CaptureError:
    mode = "training" if training else "evaluation"
    return CaptureError(
        f"cut at its blocks, {name} raises {type(error).__name__} in {mode} ({error}), and whole it does "
        "not. One stage must have what the error comes from: a gradient that forward takes, for one, with "
        "all that it goes back through. Cut at other modules"
    )


def _check_parameters(model: nn.Module, own: Mapping[int, nn.Parameter]) -> None:
    """Raise CaptureError where a copy of the model has written to one of its parameters."""
    for name, parameter in model.named_parameters():
        mine = own[id(parameter)]
        before, after = (list(map(storage_key, innermost_tensors(it))) for it in (parameter, mine))
        if times_written(mine) or before != after:
            raise written_parameter(name)


def _call(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seed: int,
) -> list[tuple[str, Any]]:
    """All that can be observed of a call, by name. The same ``seed`` gives the same random numbers."""
    trained = {name: value for name, value in parameters.items() if value.requires_grad}
    randomness.seed_all(seed)
    arguments = tree_map(fresh_leaf, (tuple(args), dict(kwargs)))
    output = module(*arguments[0], **arguments[1])
    leaves, _ = flatten(output)
    inputs = [leaf for leaf in flatten(arguments)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [*inputs, *trained.values()]
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    observed: list[tuple[str, Any]] = [("the class of what it returns", type(output))]
    observed.append(("how many values it returns", len(leaves)))
    observed += [(f"output {number}", leaf) for number, leaf in enumerate(leaves)]
    if roots and wanted:
        seeds = [torch.linspace(-1, 1, root.numel()).to(root).view(root.shape) for root in roots]
        gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        names = [*(f"input {number}" for number in range(len(inputs))), *trained]
        observed += [(f"the gradient of {name}", value) for name, value in zip(names, gradients, strict=True)]
    observed += [(f"the state of the {name}", state) for name, state in randomness.capture().items()]
    return observed


def _eager_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], last: int, *, training: bool
) -> list[tuple[str, Any]]:
    """All that can be observed of a call of another copy of the model, after the calls before it."""
    own = own_parameters(model)
    twin = twin_of(model, own)
    names = [name for name, _ in model.named_parameters()]
    parameters = dict(zip(names, own.values(), strict=True))
    with in_mode(twin, training):
        return [_call(twin, parameters, args, kwargs, call) for call in range(last + 1)][-1]


def _differing(
    observed: list[tuple[str, Any]], expected: list[tuple[str, Any]], tolerance: Tolerance
) -> list[str]:
    """The names of what differs, in order."""
    return [
        what
        for (what, mine), (_, its) in zip(observed, expected, strict=False)
        if not _same(mine, its, tolerance)
    ]


def _not_the_same(name: str, what: str, call: int, *, training: bool) -> CaptureError:
    mode = "training" if training else "evaluation"
    later = (
        ". Its first call was equal: see that no attribute that code before a cut reads is changed behind one"
        if call
        else ""
    )
    return CaptureError(
        f"cut at its blocks, {name} does not do in {mode} what it does whole: {what} differs in call "
        f"{call + 1} of the example{later}. Cut at other modules, or let one stage have what the difference "
        "comes from"
    )


def _compare_buffers(cut: nn.Module, eager: nn.Module, name: str, tolerance: Tolerance) -> None:
    buffers = dict(eager.named_buffers())
    for path, buffer in cut.named_buffers():
        atoms = path.split(".", 2)  # split_gm.submod_pp_<i>.<the model's own name>
        its = buffers.get(atoms[2])
        if its is not None and not _same(buffer, its, tolerance):
            raise CaptureError(
                f"cut at its blocks, {name} does not do what it does whole: the buffer {atoms[2]!r} differs. "
                "Cut at other modules"
            )


def _same(mine: Any, its: Any, tolerance: Tolerance) -> bool:
    if isinstance(mine, Tensor) and isinstance(its, Tensor):
        return compare_tensors(mine, its, "", tolerance) is None
    if isinstance(mine, Tensor) or isinstance(its, Tensor):
        return False
    return mine is its or (type(mine) is type(its) and randomness.same_state(mine, its))
