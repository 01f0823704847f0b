"""What somebody gets who installs partita: source archive and wheel are built, checked and tried outside of
the repository, in an environment that has nothing but the wheel and what it says that it needs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)[^)]*\)")
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
        check_description(wheel)
        run([sys.executable, "-m", "venv", "--without-pip", str(home)], elsewhere)
        python, partita = str(home / "bin" / "python"), str(home / "bin" / "partita")
        installer = [sys.executable, "-m", "pip", "--python", python]
        run([*installer, "install", "--quiet", "--no-deps", str(wheel)], elsewhere)
        link_dependencies(next(home.glob("lib/python*/site-packages")))
        run([*installer, "check"], elsewhere)
        # Every command that a newcomer tries first, and the blocks of the README as they stand.
        # Those of one process come first: what it imports is compiled once, and not by several at a time.
        run([python, "-m", "partita", "--help"], elsewhere)
        plan = [partita, "plan", "--config-json", llama_config(elsewhere), "--devices", "8xH100"]
        run([*plan, "--html", "plan.html"], elsewhere)  # of templates that the wheel has to have
        assert (elsewhere / "plan.html").is_file()
        run([partita, "bench"], elsewhere)
        run([partita, "bench", "planner", "--quick"], elsewhere)
        if "--full" in sys.argv[1:]:  # minutes
            run([partita, "demo", "--steps", "3", "--out", "demo"], elsewhere)
            assert (elsewhere / "demo" / "report.html").is_file()
            run([partita, "bench", "pipeline-memory", "--quick"], elsewhere)
        for number, block in enumerate(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))):
            script = elsewhere / f"block{number}.py"
            script.write_text(block, encoding="utf-8")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            run([python, *(launcher if "# torchrun" in block else []), str(script)], elsewhere)
    return 0


def link_dependencies(site: Path) -> None:
    """Make importable what the installed wheel needs with its extra "hf", and what that needs in turn: as it
    is installed here, with its bytecode. A copy would have to be compiled, which takes longer than all else.
    """
    (own,) = metadata.distributions(name="partita", path=[str(site)])
    left, linked = [(own, "hf")], set[tuple[str, str]]()
    while left:
        distribution, extra = left.pop()
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = metadata.distribution(requirement.name)
            for its_extra in ("", *requirement.extras):
                if (requirement.name, its_extra) not in linked:
                    linked.add((requirement.name, its_extra))
                    left.append((needed, its_extra))
            for top in {file.parts[0] for file in needed.files or []} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(needed.locate_file(top))))


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
        "num_hidden_layers": 4,
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


def check_description(wheel: Path) -> None:
    """Stop where a package index would show a link or a picture that leads nowhere."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        description = str(message_from_bytes(files.read(name)).get_payload())
    if "partita" not in description:
        sys.exit(f"{wheel.name} has no description: see setup.py")
    if broken := RELATIVE_LINK.findall(description):
        sys.exit(f"{wheel.name} is described with links that lead nowhere on a package index: {broken}")


if __name__ == "__main__":
    raise SystemExit(main())
