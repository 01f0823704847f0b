"""With this folder and the repository's root in PYTHONPATH, each Python has the device from its start."""

from tools.host_cuda.library import load

load()

from tools.host_cuda.torch_cuda import install  # noqa: E402 - torch is imported in there

install()
