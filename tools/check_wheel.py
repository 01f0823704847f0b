"""What somebody gets who installs partita: source archive and wheel are built, checked and tried in an empty
environment, outside of the repository.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCES = ("docs/pipelining.md", "examples/gpt.py", "benchmarks/harness.py", "CHANGELOG.md", "mkdocs.yml")
"""What must be in the source archive besides what the build needs."""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        built, elsewhere, home = (Path(folder) / name for name in ("dist", "elsewhere", "environment"))
        elsewhere.mkdir()
        # The wheel is made from the source archive, so that a file that is missing there is missed here.
        run([sys.executable, "-m", "build", "--outdir", str(built), str(ROOT)], ROOT)
        archive, wheel = next(built.glob("*.tar.gz")), next(built.glob("*.whl"))
        run([sys.executable, "-m", "twine", "check", "--strict", str(archive), str(wheel)], ROOT)
        check_archive(archive)
        run([sys.executable, "-m", "venv", str(home)], elsewhere)
        python, partita = str(home / "bin" / "python"), str(home / "bin" / "partita")
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        run(
            [python, "-m", "pip", "install", "--quiet", "--no-compile", *constraints, f"{wheel}[hf]"],
            elsewhere,
        )
        # Every command that a newcomer tries first, and the blocks of the README as they stand.
        # Those of one process come first: what it imports is compiled once, and not by several at a time.
        run([python, "-m", "partita", "--help"], elsewhere)
        run([partita, "plan", "--config-json", llama_config(elsewhere), "--devices", "8xH100"], elsewhere)
        run([partita, "demo", "--steps", "3", "--out", "demo"], elsewhere)
        assert (elsewhere / "demo" / "report.html").is_file()
        run([partita, "bench"], elsewhere)
        run([partita, "bench", "pipeline-memory", "--quick"], elsewhere)
        for number, block in enumerate(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))):
            script = elsewhere / f"block{number}.py"
            script.write_text(block, encoding="utf-8")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            run([python, *(launcher if "# torchrun" in block else []), str(script)], elsewhere)
    return 0


def run(command: list[str], folder: Path) -> None:
    """Run a command, which must succeed; what it prints is shown where it does not."""
    print(f"   {' '.join(Path(word).name if os.sep in word else word for word in command)}", flush=True)
    # Without what is compiled each process would compile torch again, a minute in all.
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nexit status {done.returncode}")


def llama_config(folder: Path) -> str:
    """The configuration of a Llama as ``save_pretrained`` writes it, of which a plan needs no weights."""
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
    }
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    return str(path)


def check_archive(archive: Path) -> None:
    """Stop where the source archive lacks something."""
    names = subprocess.run(["tar", "tzf", archive], capture_output=True, text=True, check=True).stdout
    missing = [name for name in SOURCES if f"/{name}\n" not in names]
    if missing:
        sys.exit(f"{archive.name} lacks {', '.join(missing)}: see MANIFEST.in")


if __name__ == "__main__":
    raise SystemExit(main())
