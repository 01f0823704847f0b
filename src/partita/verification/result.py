"""What `verify` returns: frozen, printable, free of tensors, so that it can be kept, sent or reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from partita.errors import ArgumentError, VerificationFailed
from partita.listing import first_few

__all__ = ["Difference", "DifferenceKind", "Verification"]

DifferenceKind = Literal[
    "initial state",
    "exception",
    "output",
    "aliasing",
    "printed text",
    "input",
    "parameter",
    "buffer",
    "attribute",
    "gradient",
    "random state",
    "global state",
]

_SHOWN = 12
_INDENT = "   "


@dataclass(frozen=True)
class Difference:
    """One thing that candidate and reference do not share.

    Attributes:
        kind: what was compared.
        where: its path, such as ``output['logits']``, ``args[0]`` or ``gradient of layers.0.weight``.
        message: both sides in words; for tensors the first differing index, how many elements, and how far
            apart.
        max_abs: the largest absolute difference, where numbers were compared and the shapes agree.
        piece: the piece in which the first differing node runs, where that was found.
        node: the first node, in the reference's order, whose value (or gradient) differs, where that was
            found.
    """

    kind: DifferenceKind
    where: str
    message: str
    max_abs: float | None = None
    piece: str | None = None
    node: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`.

    Attributes:
        ok: whether nothing that was compared differs.
        differences: in the order in which they are worth reading: state before, exceptions, outputs,
            aliasing, printed text, inputs, state after, gradients, random and global state. Empty where
            ``ok``.
        compared: how many things of each sort were compared, such as ``{"outputs": 2, "gradients": 14}``.
        raised: the exception that **both** sides raised, in words, or None. Nothing was returned then, so
            only what happened up to the exception was compared.
        rtol: relative tolerance that was asked for; 0 together with ``atol`` 0 means bit for bit.
        atol: absolute tolerance that was asked for.
        hints: what may explain the differences and is no fault of the candidate's.
        left_out: what the run changed and the candidate says it does not keep (``candidate.unkept``).
        without_elements: what of the reference is on the meta device or fake: there are no elements, so only
            shapes, dtypes and the like were compared.

    >>> print(Verification(ok=True, differences=(), compared={"outputs": 1, "gradients": 0}))
    equal bit for bit
       compared: 1 outputs, 0 gradients
    """

    ok: bool
    differences: tuple[Difference, ...]
    compared: Mapping[str, int] = field(default_factory=dict)
    raised: str | None = None
    rtol: float = 0.0
    atol: float = 0.0
    hints: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    without_elements: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ok != (not self.differences):
            raise ArgumentError(f"ok is {self.ok}, but there are {len(self.differences)} differences")
        object.__setattr__(self, "compared", MappingProxyType(dict(self.compared)))

    def __str__(self) -> str:
        lines = [self._headline()]
        for number, difference in enumerate(self.differences[:_SHOWN], start=1):
            lines.extend(f"{_INDENT}{line}" for line in f"{number}. {difference}".splitlines())
        if len(self.differences) > _SHOWN:
            lines.append(f"{_INDENT}... and {len(self.differences) - _SHOWN} more")
        lines.extend(f"{_INDENT}hint: {hint}" for hint in self.hints)
        if self.left_out:
            lines.append(f"{_INDENT}not kept by the candidate, as it says: {first_few(self.left_out)}")
        counts = ", ".join(f"{count} {what}" for what, count in self.compared.items())
        lines.append(f"{_INDENT}compared: {counts or 'nothing'}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy can't be pickled: a plain dict travels, and is wrapped again on arrival.
        return Verification, (
            self.ok,
            self.differences,
            dict(self.compared),
            self.raised,
            self.rtol,
            self.atol,
            self.hints,
            self.left_out,
            self.without_elements,
        )

    def check(self) -> Verification:
        """Return self where ``ok``.

        Raises:
            VerificationFailed: with ``str(self)`` as its message, where anything differs.
        """
        if not self.ok:
            raise VerificationFailed(str(self))
        return self

    def _headline(self) -> str:
        exact = self.rtol == 0.0 and self.atol == 0.0
        how = "bit for bit" if exact else f"within rtol={self.rtol:g}, atol={self.atol:g}"
        if not self.ok:
            count = len(self.differences)
            return f"not equal ({how}): {count} difference{'' if count == 1 else 's'}"
        if self.without_elements:
            return (
                f"equal, but no elements were compared of {first_few(self.without_elements)}: there are none"
            )
        if self.raised is not None:
            return f"equal {how} up to the exception that both raise: {self.raised}"
        return f"equal {how}"
