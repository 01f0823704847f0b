"""Lists of module names, shortened to what fits into a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["outermost_modules", "summarise_modules", "without_common_path"]


def outermost_modules(stages: Sequence[Iterable[str]]) -> list[tuple[str, ...]]:
    """Return for each stage the outermost modules that lie in it alone, from the innermost ones that it runs.

    A module that two stages share is named by its parts; what it computes itself is left out.

    >>> outermost_modules([["embed", "layers.0.norm", "layers.0.mlp"], ["layers.1.norm", "head"]])
    [('embed', 'layers.0'), ('layers.1', 'head')]
    """
    users: dict[str, set[int]] = {}
    listed = [list(dict.fromkeys(names)) for names in stages]
    for stage, names in enumerate(listed):
        for name in names:
            for path in _paths(name):
                users.setdefault(path, set()).add(stage)
    result = []
    for names in listed:
        outermost = dict.fromkeys(
            next((p for p in _paths(name) if len(users[p]) == 1), name) for name in names
        )
        around = {path for name in outermost for path in _paths(name)[:-1]}
        result.append(tuple(name for name in outermost if name not in around))
    return result


def without_common_path(stages: Sequence[Sequence[str]]) -> tuple[str, list[tuple[str, ...]]]:
    """Return the module that all others lie in, empty where there is none, and the names within it.

    >>> without_common_path([["model.embed", "model.layers.0-3"], ["model.layers.4-7"]])
    ('model', [('embed', 'layers.0-3'), ('layers.4-7',)])
    """
    paths = [name.split(".")[:-1] for names in stages for name in names]
    common = []
    for atoms in zip(*paths, strict=False):
        if len(set(atoms)) > 1:
            break
        common.append(atoms[0])
    around = ".".join(common)
    cut = len(around) + 1 if around else 0
    return around, [tuple(name[cut:] for name in names) for names in stages]


def _paths(name: str) -> list[str]:
    """The name of every module around ``name`` and itself, outermost first."""
    atoms = name.split(".")
    return [".".join(atoms[: length + 1]) for length in range(len(atoms))]


def summarise_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Join neighbours that differ only in a last number, counting up, to one range.

    >>> summarise_modules(["embed", "layers.0", "layers.1", "layers.2", "norm"])
    ('embed', 'layers.0-2', 'norm')
    """
    runs: list[tuple[str, int | None, int]] = []  # (prefix or whole name, first number, last number)
    for name in names:
        prefix, _, last = name.rpartition(".")
        if not (prefix and last.isascii() and last.isdigit()):
            runs.append((name, None, 0))
            continue
        number = int(last)
        if runs and runs[-1][0] == prefix and runs[-1][1] is not None and runs[-1][2] + 1 == number:
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    return tuple(_written(*run) for run in runs)


def _written(prefix: str, first: int | None, last: int) -> str:
    if first is None:
        return prefix
    return f"{prefix}.{first}" if first == last else f"{prefix}.{first}-{last}"
