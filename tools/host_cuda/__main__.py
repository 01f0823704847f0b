"""Build the device: ``python -m tools.host_cuda`` compiles ``device.cpp`` where ``library.PATH`` says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from tools.host_cuda.library import PATH
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("device.cpp")


def main() -> None:
    """Compile, unless the library is newer than its source and than torch, which is one for the CPU."""
    if torch.version.cuda is not None:
        sys.exit(
            f"torch {torch.__version__} has a CUDA device of its own: take one that is built for the CPU"
        )
    libraries = Path(torch.__file__).parent / "lib"
    newest = max(path.stat().st_mtime for path in (SOURCE, libraries / "libtorch_cpu.so"))
    if PATH.exists() and PATH.stat().st_mtime > newest:
        return
    PATH.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-O1", "-w", "-std=c++20", "-fPIC", "-shared", str(SOURCE), "-o", str(PATH)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{libraries}"]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
