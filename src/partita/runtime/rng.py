"""Random numbers that don't depend on the rank that draws them, or on when it does.

In a captured pipeline each random call is keyed by ``(seed, step, microbatch, call site)``. Right before it,
a node in the graph seeds torch's default generator with a number made of these four, so dropout draws the
same mask whatever the number of stages or ranks, the schedule, or the placement::

    with keyed(RandomKey(seed, step, microbatch)):     seed of site 0      seed of site 1
        stage 0:  linear ── enter_site(0) ── dropout ── linear ── enter_site(1) ── dropout

Without an active key, ``enter_site`` does nothing, and the graph draws from torch's generator exactly as the
model would.

The generator's state is put back when the last block of the process that has seeded it ends. Blocks of
several ranks in one process may overlap in any way (ranks take turns where they wait): every keyed call is
seeded immediately before it draws, so only what stands at the very end matters. A random call without a site,
inside a block, draws from an unspecified state.

``torch.compile`` finds an operator in its place, so a compiled graph has no breaks. The backends ``eager``
and ``aot_eager`` then draw the same bits; Inductor has a random number generator of its own, whose numbers
differ from those and depend on the same key.

What activation checkpointing computes again during a backward pass draws what it drew before, where that
pass too runs in a block with its microbatch's key, ``backward=True``.

On CPU, torch's generator (mt19937) uses the lower 32 bits of its seed, so two of `n` keyed calls share a
stream with a probability of about n²/2³³.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType

import torch
from torch.fx import GraphModule, Node, has_side_effect

from partita.errors import ArgumentError

__all__ = [
    "RandomKey",
    "active_seed",
    "enter_site",
    "first_site",
    "key_random_nodes",
    "keyed",
    "site_seed",
    "sites_from",
]

_MASK = 2**64 - 1

_library = torch.library.Library("partita", "FRAGMENT")
# The tag keeps it where it stands among the random calls, whoever cuts or orders the graph.
# It returns an empty tensor since what has no device is no border for Inductor, which would fuse across it,
# and let go before it of what it reads behind it (torch 2.13, CPU).
_library.define("seed_site(int site) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_OPERATOR = torch.ops.partita.seed_site.default
has_side_effect(_OPERATOR)


@dataclass(frozen=True, slots=True)
class RandomKey:
    """What the random numbers of one microbatch depend on, besides the call site."""

    seed: int
    step: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.step < 0 or self.microbatch < 0:
            raise ArgumentError(f"step ({self.step}) and microbatch ({self.microbatch}) count from 0")


_active: ContextVar[keyed | None] = ContextVar("partita_keyed", default=None)
_backward: list[keyed] = []
"""For autograd's own threads (there is one for each CUDA device), which see no context variable."""


class _Saved:
    """The states of the generators that keyed calls have seeded, as they were before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: set[keyed] = set()
        self.states: dict[torch.Generator, torch.Tensor] = {}
        self.ever_seeded: set[torch.Generator] = set()

    def seed(self, block: keyed, generator: torch.Generator, seed: int) -> None:
        """Seed a generator in a block; its state is put back after all such blocks have ended."""
        if generator not in self.states:
            self.states[generator] = generator.get_state()
            self.ever_seeded.add(generator)
        self.blocks.add(block)
        generator.manual_seed(seed)

    def keep(self, block: keyed) -> None:
        """Keep the states of all generators that were ever seeded until that block ends."""
        with self.lock:
            self.blocks.add(block)
            for generator in self.ever_seeded:
                self.states.setdefault(generator, generator.get_state())

    def leave(self, block: keyed) -> None:
        """End a block; after the last one, put the states back."""
        with self.lock:
            self.blocks.discard(block)
            if self.blocks:
                return
            for generator, state in self.states.items():
                generator.set_state(state)
            self.states.clear()


_saved = _Saved()


class keyed:  # noqa: N801 - a context manager that reads as a verb
    """In this block, ``enter_site`` seeds by `key`. Afterwards torch's generators are as before.

    Args:
        backward: the block is a backward pass: the key holds in autograd's threads too, and generators are
            kept from the start, since what is computed again sets their states itself. One at a time.
        entered: called with each site that is entered.

    >>> def draw():
    ...     enter_site(3)
    ...     return torch.rand(2)
    >>> with keyed(RandomKey(seed=0, step=1, microbatch=2)):
    ...     a = draw()
    >>> with keyed(RandomKey(seed=0, step=1, microbatch=2)):
    ...     b = draw()
    >>> torch.equal(a, b)
    True
    """

    __slots__ = ("_backward", "_token", "entered", "first_site", "key")

    def __init__(
        self, key: RandomKey, *, backward: bool = False, entered: Callable[[int], object] | None = None
    ) -> None:
        self.key = key
        self.entered = entered
        self.first_site = 0
        self._backward = backward
        self._token: Token[keyed | None] | None = None

    def __enter__(self) -> RandomKey:
        self._token = _active.set(self)
        if self._backward:
            _backward.append(self)
            if _saved.ever_seeded:
                _saved.keep(self)
        return self.key

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        _active.reset(self._token)
        if self._backward:
            _backward.pop()
        if self in _saved.blocks:
            _saved.leave(self)


def site_seed(key: RandomKey, site: int) -> int:
    """Return the 64-bit seed of one call site: SplitMix64's finaliser, applied to the four numbers in turn.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 14
    and section 5 (the mixing function of Stafford, variant 13).
    """
    state = 0
    for number in (key.seed, key.step, key.microbatch, site):
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def active_seed(site: int) -> int | None:
    """Return the seed that `enter_site` would use here, for generators of others; None without a key."""
    block = _active.get() or (_backward[-1] if _backward else None)
    return None if block is None else site_seed(block.key, block.first_site + site)


@contextmanager
def sites_from(first: int) -> Iterator[None]:
    """In this block the sites of the active key count from that number: code that several places share has
    sites of its own in each.
    """
    block = _active.get() or (_backward[-1] if _backward else None)
    if block is None:
        yield
        return
    before, block.first_site = block.first_site, first
    try:
        yield
    finally:
        block.first_site = before


def first_site() -> int:
    """From which number the sites of the active key count."""
    block = _active.get()
    return 0 if block is None else block.first_site


def enter_site(site: int) -> None:
    """Seed the random call number `site`, right before which it stands in a graph.

    Pickle a keyed graph by its nodes, never by fx's own way for a GraphModule: that runs the generated code
    through symbolic tracing, where a call whose arguments are all constants, like this one, leaves no node.

    Under an active key it seeds torch's default CPU generator, and the current CUDA device's where CUDA is in
    use. With none it does nothing at all.
    """
    if torch.compiler.is_compiling():
        torch.ops.partita.seed_site(site)
    else:
        _seed(site)


def _seed(site: int) -> None:
    block = _active.get() or (_backward[-1] if _backward else None)
    if block is None:
        return
    site += block.first_site
    if block.entered is not None:
        block.entered(site)
    seed = site_seed(block.key, site)
    _saved.seed(block, torch.default_generator, seed)
    if torch.cuda.is_initialized():
        _saved.seed(block, torch.cuda.default_generators[torch.cuda.current_device()], seed)


def _seed_compiled(site: int) -> torch.Tensor:
    _seed(site)
    return _nothing(site)


def _nothing(_: int) -> torch.Tensor:
    return torch.empty(0, device="cpu")


_library.impl("seed_site", _seed_compiled, "CompositeExplicitAutograd")
torch.library.register_fake("partita::seed_site", _nothing, lib=_library)
has_side_effect(enter_site)  # dead-code elimination must leave it where it stands


def key_random_nodes(graph_module: GraphModule, is_random: Callable[[Node], bool]) -> int:
    """Insert an ``enter_site`` node right before each random node of `graph_module`, in place, and return how
    many were inserted.

    Sites are numbered in the order of the graph, before any cut; a cut must keep each pair together. Calling
    it again adds nothing.
    """
    random_nodes = [node for node in graph_module.graph.nodes if is_random(node)]
    inserted = 0
    for site, node in enumerate(random_nodes):
        if node.prev.op == "call_function" and node.prev.target is enter_site:
            continue
        with graph_module.graph.inserting_before(node):
            graph_module.graph.call_function(enter_site, (site,))
        inserted += 1
    if inserted:
        graph_module.recompile()
    return inserted
