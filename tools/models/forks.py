"""Words of the column of compiled stages, each made in a fork of one process that has imported everything and
has compiled a small pipeline once: imports take as long as half of a row.
"""

from __future__ import annotations

import multiprocessing
import warnings
from multiprocessing.connection import Connection

import torch
from tools.models.architecture import Architecture
from tools.models.row import called_model, compiled_word
from tools.models.zoo import ZOO

__all__ = ["compiled_in_fork"]

_FORKS = multiprocessing.get_context("forkserver")


def compiled_in_fork(architecture: Architecture, limit: float) -> str:
    """Return `tools.models.row.compiled_word` of an architecture, or what became of the process.

    Args:
        limit: seconds.
    """
    # Here and not where this is imported: a process has one server of forks, whoever asks for it.
    _FORKS.set_forkserver_preload(["tools.models.warm"])
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_send_word, args=(architecture.name, sender))
    process.start()
    sender.close()
    if not receiver.poll(limit):
        process.kill()
        process.join()
        return f"not done after {limit:.0f} s"
    try:
        word: str = receiver.recv()
    except EOFError:
        process.join()
        return f"exit status {process.exitcode}"
    process.join()
    return word


def _send_word(name: str, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    [architecture] = [candidate for candidate in ZOO if candidate.name == name]
    try:
        word = compiled_word(architecture, *called_model(architecture))
    except Exception as error:
        word = f"{type(error).__name__}: {error}"
    sender.send(word)
