"""`verify`: whether the candidate is observably equal to the reference."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita._torch.autograd import global_settings as ambient
from partita._torch.modules.compiled import draws_other_numbers
from partita._torch.tensors.storage import has_memory
from partita.errors import ArgumentError, ArgumentTypeError, NotCompiled, NotProven
from partita.listing import first_few
from partita.verification.comparing.compare import Tolerance
from partita.verification.comparing.judge import Judge
from partita.verification.comparing.state_comparison import StateComparison
from partita.verification.explaining.explain import explain as locate
from partita.verification.explaining.explain import explainable
from partita.verification.observing import randomness
from partita.verification.observing.observe import Mode, Observation, observe
from partita.verification.observing.subject import is_pipe, subject_of
from partita.verification.result import Verification
from partita.verification.tree import tensors

__all__ = ["verify"]

_OTHER_NUMBERS = (
    "the reference draws random numbers (dropout, say), and Inductor draws others than eager mode does: "
    'compile with options={"fallback_random": True} to compare them (a pipe with '
    'compile={"options": {"fallback_random": True}}), or compare with mode="eval"'
)


@dataclass(frozen=True)
class _Run:
    """How both sides are run."""

    backward: bool
    mode: Mode | None
    seed: int

    def options(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"backward": self.backward, "mode": self.mode, "seed": self.seed}


def verify(
    candidate: Any,
    reference: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: Mode | None = None,
    backward: bool = True,
    seed: int = 0,
    rtol: float = 0.0,
    atol: float = 0.0,
    strides: bool = False,
    explain: bool = True,
    train: bool | None = None,
) -> Verification:
    """Run candidate and reference from equal state and compare everything that can be observed of the runs.

    Compared: outputs (nested; structure, types, shapes, dtypes, devices, ``requires_grad``, elements), which
    tensors share memory, printed text, arguments after the run, parameters, buffers and other attributes
    after the run, gradients of parameters and arguments, the state of every random generator, grad mode,
    inference mode, autocast, deterministic flags and default dtype after the run, and exceptions (type;
    message loosely). Elements must be equal bit for bit (any NaN equals any NaN), unless a tolerance is
    given.

    Both run on copies, with the same seed, under the caller's grad mode, inference mode and autocast. The
    caller's modules, arguments, gradients, random generators and settings do not change, and nothing is
    printed.

    Args:
        candidate: a `Split`, a `Pipe` (whose stages run compiled where it says so, and warn with
            `NotCompiled` where that can't be), a module, or any callable. Its state is matched with the
            reference's by object and name; names may have a prefix, such as that of a piece.
        reference: a module or any callable.
        args: the positional arguments.
        kwargs: the keyword arguments.
        mode: ``"train"`` or ``"eval"``: the copies of both sides' modules are put into that mode first. None:
            training flags are taken as they are, on both sides.
        backward: also run the backward, from random cotangents that are the same on both sides, into every
            output that requires grad, and compare gradients. False: no backward; the forward is the same.
        seed: seeds the generators before each run, and the cotangents; an int in [0, 2**32).
        rtol: relative tolerance for floating-point and complex elements.
        atol: absolute tolerance.
        strides: whether strides of outputs and arguments must be equal too.
        explain: where a graph was cut and something differs, run both again node by node, to name the first
            node that differs and its piece (of compiled pieces, the piece). Takes memory for a copy of every
            intermediate value.
        train: the old name of ``backward``, which said something else than it did: it never changed the mode.
            Gives a DeprecationWarning.

    Warns:
        NotProven: tensors of the reference are on the meta device or fake: they have no elements to compare.

    Returns:
        A `Verification`: print it, look at ``.ok``, or call ``.check()``, which raises where anything
        differs.

    Raises:
        ArgumentTypeError: bad usage: ``args`` is not a tuple, something can't be called or copied.
        ArgumentError: a tolerance or seed out of range, or another mode.

    Not compared: text that compiled code prints without ``sys.stdout``, attributes that are no tensors,
    numbers or text, private ones (with an underscore) that are no tensors, hooks on tensors (copies lose
    them), state that a function reaches through other files' functions or globals, and the attributes that
    ``candidate.unkept`` names, as that of a `Pipe` does: the result has them as ``left_out``.

    >>> import torch
    >>> print(verify(torch.abs, torch.neg, (torch.tensor([1.0, -2.0]),)).differences[0])
    output: 1 of 2 elements differ, first at [0]: 1.0, not -1.0; max abs 2, max rel 2, max ulp 2.131e+09
    """
    kwargs = {} if kwargs is None else kwargs
    if train is not None:
        warnings.warn(
            f"verify(train={train}) is now verify(backward={train}): it says whether there is a backward, "
            'and not in which mode the model is, which is mode="train" or mode="eval"',
            DeprecationWarning,
            stacklevel=2,
        )
        if train and not backward:
            raise ArgumentError(
                "train=True is the old name of backward=True, and backward=False is here too: leave train "
                'out, and give mode="train" for the mode'
            )
        backward = train
    if mode not in (None, "train", "eval"):
        raise ArgumentError(f"mode is {mode!r:.40}; give 'train', 'eval', or None for the modules' own flags")
    if not isinstance(backward, bool):
        raise ArgumentTypeError(f"backward is a {type(backward).__name__}; give True or False")
    how = _Run(backward, mode, seed)
    _check_usage(args, kwargs, seed)
    tolerance = Tolerance(rtol, atol)
    # Outermost: what a run leaked may live in the copies, and act when they are freed.
    with ambient.preserved():
        return _verify(candidate, reference, (args, kwargs), how, tolerance, strides, explain)


def _verify(
    candidate: Any,
    reference: Any,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    how: _Run,
    tolerance: Tolerance,
    strides: bool,
    explain: bool,
) -> Verification:
    # Run both.
    args, kwargs = call
    subjects = subject_of(candidate), subject_of(reference)
    state = StateComparison(*subjects, tolerance)
    judge = Judge(state, tolerance, strides)
    differences = tuple(state.initial())
    theirs = observe(subjects[1], args, kwargs, **how.options())
    mine = observe(subjects[0], args, kwargs, **how.options())
    for text in mine.uncompiled:  # what is verified then is not what was asked
        warnings.warn(text, NotCompiled, stacklevel=3)
    bare = _without_elements(theirs)
    if bare:
        warnings.warn(
            f"no elements were compared of {first_few(bare)}: what is on the meta device, or fake, has none. "
            "Make the model and its arguments with values",
            NotProven,
            stacklevel=3,
        )
    # Compare.
    differences += tuple(judge.differences(mine, theirs))
    declared = getattr(candidate, "unkept", ())
    unkept = {f"attribute {name}" for name in (declared if isinstance(declared, tuple) else ())}
    left_out = tuple(one.where for one in differences if one.kind == "attribute" and one.where in unkept)
    differences = tuple(one for one in differences if one.where not in left_out)
    raised = None if differences or theirs.raised is None else str(theirs.raised)
    hints = _hints(candidate, theirs, how.seed) if differences else ()
    leaked = mine.leaked_inference_mode or theirs.leaked_inference_mode
    compared = {**judge.compared, **state.compared}
    # Free the first runs; then run again, to explain.
    del mine, theirs
    if leaked:
        gc.collect()  # a guard that was left open resets the mode when it is freed: now, not later
    if differences and explain and explainable(candidate, reference):
        differences = locate(differences, candidate, subjects, call, tolerance=tolerance, **how.options())
    rtol, atol = tolerance.rtol, tolerance.atol
    return Verification(not differences, differences, compared, raised, rtol, atol, hints, left_out, bare)


def _without_elements(run: Observation) -> tuple[str, ...]:
    """What of a run is on the meta device or fake."""
    copies = run.copies
    nested = {"output": run.output, "args": copies.args, "kwargs": copies.kwargs}
    named = [item for root, value in nested.items() for item in tensors(value, root)]
    named += [(name, one.tensor) for name, one in run.tensors().items()]
    return tuple(name for name, tensor in named if not has_memory(tensor))


def _hints(candidate: Any, reference: Observation, seed: int) -> tuple[str, ...]:
    """What may explain the differences and is no fault of the candidate's."""
    with randomness.preserved():
        randomness.seed_all(seed)
        seeded = randomness.capture()
    drew = any(
        not randomness.same_state(state, seeded[name])
        for (_, name), state in reference.random.items()
        if name in seeded
    )
    other = candidate.draws_other_numbers if is_pipe(candidate) else draws_other_numbers(candidate)
    return (_OTHER_NUMBERS,) if drew and other else ()


def _check_usage(args: object, kwargs: object, seed: object) -> None:
    if not isinstance(args, tuple):
        raise ArgumentTypeError(
            f"args is a {type(args).__name__}; give a tuple of the positional arguments, such as (x,)"
        )
    if not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"kwargs is a {type(kwargs).__name__}; give a mapping from names to keyword arguments"
        )
    if not isinstance(seed, int):
        raise ArgumentTypeError(f"seed is a {type(seed).__name__}; give an int in [0, 2**32)")
    if not 0 <= seed < 2**32:
        raise ArgumentError(f"seed is {seed}; give an int in [0, 2**32)")
