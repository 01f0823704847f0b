"""The page ``docs/models.md``, from rows."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from tools.models.cuts import COMPILED, MICROBATCHES, SAMPLES
from tools.models.row import CELLS, COMPILED_WORDS, STAGES, Row
from tools.models.zoo import PARTS, ZOO

__all__ = [
    "COMPILED_COLUMN",
    "SECOND_PART",
    "compiled_cell",
    "compiled_count",
    "compiled_reasons",
    "compiled_text",
    "page",
    "versions",
]

COMPILED_COLUMN = "compiled"

_LIBRARIES = ("torch", "transformers", "timm", "diffusers", "x-transformers", "peft", "partita")

_HEAD = """# Architectures

Made by `python -m tools.models_table`; do not edit. Each architecture of the tables has a tiny configuration and random weights, and is
the library's own class, unchanged. It is cut in {stages} stages by plan and compared with the uncut model, bit for bit.

Where `pipeline(...)` refuses a model in training, since it can't be captured, `frontend="modules"` cuts it: the column "cut by" says so.

With {versions}.
"""

_FIRST = """
# First part: Hugging Face transformers

| column | what is compared |
|---|---|
| train, eval | a local call of the `Pipe` with a call of the model itself, in that mode, by `partita.verify`: outputs (type and structure too), gradients of all parameters, buffers, torch's random state afterwards, dropout on in train mode |
| step | a 1F1B step of ranks in one process, {microbatches} microbatches of {samples}, with `UncutReference` (where the model's own code is cut, with the model itself, dropout at 0): merged output, losses, gradients, parameters and buffers of every stage |
| compiled | {compiled_text} |
| torch | `torch.distributed.pipelining.pipeline` on the same model, cut in two before its middle block, in evaluation mode: whether it cuts at all, and whether the tensors that come out are equal |

**{passed} of {total} are equal in everything, {compiled}; torch's own `pipeline`, cutting in 2 only, gives equal outputs for {torch}.**
"""

SECOND_PART = "# Second part: more libraries, other inputs, the eager model"

_SECOND = (
    f"\n{SECOND_PART}\n"
    + """
None of these is in the first part. Everything is compared with the **eager** model, on inputs that are not the example that it was cut with.

| column | what is compared |
|---|---|
| train, eval | local calls of the `Pipe` with calls of the model itself, in that mode, by `partita.verify`: outputs (type and structure too), gradients of all parameters and of all inputs of real numbers (some models refuse inputs that ask for them), buffers, torch's random state afterwards; dropout on in train mode. Values are drawn anew; where there are masks, they have the example's pattern, are all ones, and have another padding in each sample |
| batch | whether another batch size ({larger}, where the example has {samples}) is open; then it is one of the calls that train and eval compare |
| step | a 1F1B step of ranks in one process, {microbatches} microbatches of {samples}, with the eager model run over these in order and gradients accumulated: type and elements of the merged output, losses, gradients, parameters and buffers of every stage; dropout at 0, since a step draws its random numbers by a rule of its own |

A cell is **equal**, or **refused** (an error said so before any number came out), or **differs**.

**{passed} of {total} are equal in everything.**
"""
)

_TAIL = """
# What the rows say

- Settings are each configuration's own where they are not a size: dropout, caches (a model's cache comes out of the pipeline as the
  cache object that the model returns), masks, tied embeddings, shared layers. `own mask` has no `attention_mask`, `mask of ones` one
  that hides nothing, the others one with padding.
- A model that asks `torch.compiler.is_exporting()` is answered as when nobody traces it, so the graph has the operations that the model
  runs for its user. Where a model looks at the *data* while it runs (whether a mask hides anything), a graph can only have the general
  way, and last bits of gradients may differ from the shortcut's.
- Where torch has no rule for the shapes of an operator that the model runs for its user (`grouped_mm` in float32), the model is traced in
  the way that it keeps for exporters; Qwen3-Next has another algorithm there, with other last bits.
- BigBird seeds numpy's generator in training and draws its random blocks from it. The graph has the same blocks, but leaves that
  generator where it was.
- `layerdrop` decides in Python, by a random number, whether a layer runs: no graph can, so these models are cut by their modules.
- In the second part, parameters that begin at zero or next to it (last layers, adapters, scales of layers) are drawn at random: else
  most gradients would be zero, and equal whatever happens.
"""


def page(rows: Sequence[Row]) -> str:
    """Write the whole page."""
    by_part = [
        [row for row in rows if row.name in {architecture.name for architecture in part}] for part in PARTS
    ]
    text = _HEAD.format(stages=" and in ".join(str(stages) for stages in STAGES), versions=versions())
    for head, extra, part in zip(
        (_FIRST, _SECOND), ((COMPILED_COLUMN, "torch"), ("batch",)), by_part, strict=True
    ):
        if part:
            text += _part(head, extra, part)
    present = {row.name for row in rows}
    missing = [architecture.name for architecture in ZOO if architecture.name not in present]
    if missing:
        text += f"\n# Not run for this page\n\n{'; '.join(missing)}.\n"
    return text + _TAIL


def _part(head: str, extra: Sequence[str], rows: Sequence[Row]) -> str:
    text = head.format(
        microbatches=MICROBATCHES,
        samples=SAMPLES,
        larger=SAMPLES + 1,
        passed=sum(row.passed for row in rows),
        total=len(rows),
        torch=sum(row.torch_own == "equal" for row in rows),
        compiled=compiled_count(rows),
        compiled_text=compiled_text(),
    )
    families = dict.fromkeys(row.family for row in rows)
    for family in families:
        table = _table([row for row in rows if row.family == family], extra)
        text += f"\n## {family[0].upper()}{family[1:]}\n\n{table}"
    reasons = [*_reasons(row for row in rows if not row.passed), *compiled_reasons(rows)]
    if reasons:
        text += "\n## Why not\n\n" + "\n".join(reasons) + "\n"
    return text


def compiled_text() -> str:
    """What stands in the column of compiled stages."""
    return (
        "steps of stages compiled with `aot_eager`, four of them on 2 ranks in one process, under "
        f'{" and ".join(COMPILED)}: what "step" compares, with the uncut eager graph; where compiling itself changes '
        'last bits, with the uncut model compiled as one stage ("as compiled")'
    )


def compiled_count(rows: Sequence[Row]) -> str:
    """How many are equal with compiled stages."""
    words = [row.compiled for row in rows]
    eager, whole = map(words.count, COMPILED_WORDS)
    count = f"{eager + whole} with compiled stages ({whole} of them to the uncut model compiled)"
    return count if all(words) else f"{count}, of {sum(map(bool, words))} that were run"


def compiled_cell(row: Row) -> str:
    """The word of a row in the column of compiled stages."""
    if not row.compiled:
        return "not run"
    return row.compiled if row.compiled in COMPILED_WORDS else "**no**"


def compiled_reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Why compiled stages are not equal, a line each."""
    for row in rows:
        if row.compiled and row.compiled not in COMPILED_WORDS:
            yield f"- **{row.name}** ({COMPILED_COLUMN}): `{_short(row.compiled)}`"


def versions() -> str:
    """With which libraries the page is made."""
    named = ", ".join(f"{name} {number}" for name in _LIBRARIES if (number := _version(name)))
    return f"{named}, Python {platform.python_version()}, one thread, {platform.machine()} CPU"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _table(rows: Iterable[Row], extra: Sequence[str]) -> str:
    head = ["architecture", "class", "cut by", *CELLS, *extra]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [_cell(row.cells[cell], "torch" in extra) for cell in CELLS]
        words = {"torch": _torch_word(row.torch_own), "batch": row.batch.split(":")[0]}
        words[COMPILED_COLUMN] = compiled_cell(row)
        last = [words[column] for column in extra]
        lines.append(f"| {' | '.join([row.name, f'`{row.model}`', row.frontend, *cells, *last])} |")
    return "\n".join(lines) + "\n"


def _cell(text: str, first_part: bool) -> str:
    if text == "":
        return "equal"
    if first_part:
        return "**no**"
    return "**differs**" if text.startswith("AssertionError") else "**refused**"


def _torch_word(text: str) -> str:
    if text == "equal":
        return text
    if match := re.match(r"AssertionError: (cut in \d+), not", text):
        return match[1]
    return "differs" if text.startswith("AssertionError") else "does not cut"


def _reasons(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        by_text: dict[str, list[str]] = {}
        for cell in CELLS:
            if row.cells[cell]:
                by_text.setdefault(_short(row.cells[cell]), []).append(cell)
        for text, cells in by_text.items():
            yield f"- **{row.name}** ({', '.join(cells)}): `{text}`"


def _short(text: str, limit: int = 280) -> str:
    """Return one line, without the paths of the machine that made it."""
    line = " ".join(text.replace("`", "'").replace("|", "/").split())
    words = [word if word.count("/") < 3 else "/".join(["…", *word.split("/")[-2:]]) for word in line.split()]
    line = " ".join(words)
    return line if len(line) <= limit else line[: limit - 1] + "…"
