"""The page ``docs/models.md``, from rows."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from tools.hf.row import CELLS, MICROBATCHES, SAMPLES, STAGES, Row
from tools.hf.zoo import ZOO

__all__ = ["page"]

_HEAD = """# Hugging Face architectures

Made by `python -m tools.hf_table` (extra `hf`); do not edit. Each architecture of the table has a tiny configuration and random
weights, and is the library's own class, unchanged. It is cut in {stages} stages by plan and compared with the uncut model, bit for bit.

| column | what is compared |
|---|---|
| train, eval | a local call of the `Pipe` with a call of the model itself, in that mode, by `partita.verify`: outputs (type and structure too), gradients of all parameters, buffers, torch's random state afterwards, dropout on in train mode |
| step | a 1F1B step of ranks in one process, {microbatches} microbatches of {samples}, with `UncutReference`: merged output, losses, gradients, parameters and buffers of every stage |
| torch | `torch.distributed.pipelining.pipeline` on the same model, cut in two before its middle block, in evaluation mode: whether it cuts at all, and whether the tensors that come out are equal |

**{passed} of {total} are equal in everything; torch's own `pipeline`, cutting in 2 only, gives equal outputs for {torch}.** With {versions}.
"""

_TAIL = """
## What the rows say

- Settings are each configuration's own where they are not a size: dropout, caches (`past_key_values` comes out of the pipeline as the
  cache object that the model returns), masks, tied embeddings, shared layers. `own mask` has no `attention_mask`, `mask of ones` one
  that hides nothing, the others one with padding.
- A model that asks `torch.compiler.is_exporting()` is answered as when nobody traces it, so the graph has the operations that the model
  runs for its user. Where a model looks at the *data* while it runs (whether a mask hides anything), a graph can only have the general
  way, and last bits of gradients may differ from the shortcut's.
- Where torch has no rule for the shapes of an operator that the model runs for its user (`grouped_mm` in float32), the model is traced in
  the way that it keeps for exporters; Qwen3-Next has another algorithm there, with other last bits.
- BigBird seeds numpy's generator in training and draws its random blocks from it. The graph has the same blocks, but leaves that
  generator where it was.
- `layerdrop` decides in Python, by a random number, whether a layer runs: no graph can. In evaluation mode, or with the rate at 0, the
  same models are cut.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    passed = sum(row.passed for row in rows)
    parts = [
        _HEAD.format(
            stages=" and in ".join(str(stages) for stages in STAGES),
            microbatches=MICROBATCHES,
            samples=SAMPLES,
            passed=passed,
            total=len(rows),
            torch=sum(row.torch_own == "equal" for row in rows),
            versions=_versions(),
        )
    ]
    families = dict.fromkeys(row.family for row in rows)
    parts += [_family(family, [row for row in rows if row.family == family]) for family in families]
    failed = [row for row in rows if not row.passed]
    if failed:
        parts.append("\n## Why not\n\n" + "\n".join(_reasons(failed)) + "\n")
    made = {row.name for row in rows}
    missing = [architecture.name for architecture in ZOO if architecture.name not in made]
    if missing:
        parts.append(f"\n## Not run for this page\n\n{'; '.join(missing)}.\n")
    return "".join(parts) + _TAIL


def _family(name: str, rows: Sequence[Row]) -> str:
    return f"\n## {name[0].upper()}{name[1:]}\n\n{_table(rows)}"


def _versions() -> str:
    named = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "partita"))
    return f"{named}, Python {platform.python_version()}, one thread, {platform.machine()} CPU"


def _table(rows: Iterable[Row]) -> str:
    head = ["architecture", "class", *CELLS, "torch"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = ["equal" if row.cells[cell] == "" else "**no**" for cell in CELLS]
        torch_own = "equal" if row.torch_own == "equal" else _torch_word(row.torch_own)
        lines.append(f"| {' | '.join([row.name, f'`{row.model}`', *cells, torch_own])} |")
    return "\n".join(lines) + "\n"


def _torch_word(text: str) -> str:
    if found := re.match(r"AssertionError: (cut in \d+), not", text):
        return found[1]
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
    """One line, without the paths of the machine that made it."""
    plain = " ".join(text.replace("`", "'").replace("|", "/").split())
    words = [
        word if word.count("/") < 3 else "/".join(["…", *word.split("/")[-2:]]) for word in plain.split()
    ]
    plain = " ".join(words)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"
