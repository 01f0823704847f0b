"""From a folder of safetensors files to a checkpoint that any number of stages loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from partita.errors import CheckpointError
from partita.listing import listed
from partita.pipelining.checkpoints.contents.replicas import under
from partita.pipelining.checkpoints.files.manifest import MANIFEST, UNFINISHED
from partita.pipelining.checkpoints.files.manifest_writer import METADATA, ManifestWriter
from partita.pipelining.checkpoints.pretrained.model_names import match_model
from partita.pipelining.checkpoints.pretrained.new_folder import check_replaceable, new_folder
from partita.pipelining.checkpoints.pretrained.safetensors_files import SafetensorsFiles
from partita.pipelining.checkpoints.together.torch_messages import quiet_alone, reason

__all__ = ["Imported", "import_pretrained"]

_OWN = (METADATA, MANIFEST, UNFINISHED, "*.distcp")


@dataclass(frozen=True)
class Imported:
    """What `import_pretrained` has written.

    Attributes:
        tensors: how many there are.
        bytes: of the tensors.
    """

    tensors: int
    bytes: int


def import_pretrained(
    folder: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    model_key: str = "model",
    overwrite: bool = False,
    progress: Callable[[float], object] | None = None,
) -> Imported:
    """Write the tensors of safetensors files as a checkpoint, for `load_checkpoint` with any cut.

    One process does it, alone. Tensors are copied one after the other, as they are (`load_checkpoint`
    converts with ``cast=True``), and get checksums; the files themselves have none. The checkpoint is there
    as a whole at the end, or not at all.

    Args:
        folder: what ``save_pretrained`` or `export_pretrained` wrote: a ``.safetensors`` file, an index, or a
            directory with either.
        checkpoint: the new directory; an empty one may be there.
        model: the model that will load it, on any device, ``meta`` too: its names and shapes are compared
            with the files', and a tied tensor is found under each of its names.
        model_key: the prefix of the names in the checkpoint; empty for none.
        overwrite: replace a checkpoint that is there.
        progress: called with the share that is done.

    Raises:
        CheckpointError: a file that is missing or damaged, tensors that are not the model's, or a checkpoint
            that is there already or can't be written.

    >>> import tempfile, torch
    >>> from partita.pipelining import load_checkpoint
    >>> from safetensors.torch import save_file
    >>> folder = tempfile.mkdtemp()
    >>> save_file(torch.nn.Linear(2, 2).state_dict(), f"{folder}/model.safetensors")
    >>> import_pretrained(folder, f"{folder}/checkpoint")
    Imported(tensors=2, bytes=24)
    >>> load_checkpoint(f"{folder}/checkpoint", torch.nn.Linear(2, 2)).missing
    ()
    """
    target = Path(checkpoint)
    check_replaceable(target, _OWN, overwrite=overwrite, what="an import")
    with ExitStack() as stack:
        files = SafetensorsFiles(Path(folder), stack)
        headers = {key: files.describe(key) for key in files.places}
        unknown = [f"{key} ({dtype})" for key, (_, dtype) in headers.items() if isinstance(dtype, str)]
        if unknown:
            raise CheckpointError(
                f"{os.fspath(folder)!r} has tensors of dtypes that are not read here: {listed(unknown)}; "
                "convert them first"
            )
        aliases = {} if model is None else _aliases(model, files, headers, model_key)
        # Views of the mapped files: what is written is read then, and not kept.
        tensors = {key: files.read(key) for key in headers}
        total = sum(tensor.nbytes for tensor in tensors.values())
        with new_folder(target) as draft:
            writer = ManifestWriter(draft, aliases)
            planner = _ProgressPlanner(total, progress)
            try:
                with quiet_alone():
                    save(
                        {model_key: tensors} if model_key else tensors,
                        storage_writer=writer,
                        planner=planner,
                        no_dist=True,
                    )
            except CheckpointException as error:
                raise CheckpointError(
                    f"the checkpoint {os.fspath(checkpoint)!r} could not be written: {reason(error)}"
                ) from error
    if progress is not None:
        progress(1.0)
    return Imported(len(tensors), total)


def _aliases(
    model: nn.Module, files: SafetensorsFiles, headers: Mapping[str, tuple[tuple[int, ...], Any]], key: str
) -> dict[str, str]:
    """From each further name of a tied tensor to the one that is stored."""

    def message(missing: Sequence[str]) -> str:
        return (
            f"{files.path!r} does not have {listed(missing)}: it has {listed(files.keys(), limit=3)}. Where "
            "transformers stores a model under other names than its modules have, load it by from_pretrained "
            "and save that: save_checkpoint(path, model)"
        )

    shapes = {name: shape for name, (shape, _) in headers.items()}
    aliases: dict[str, str] = {}
    for names in match_model(model, shapes, repr(files.path), message):
        stored = next(name for name in names if name in shapes)
        aliases |= {under(key, name): under(key, stored) for name in names if name not in shapes}
    return aliases


class _ProgressPlanner(DefaultSavePlanner):
    """Reports what is written: the first half of the work. The second is reading it again for checksums."""

    def __init__(self, total: int, progress: Callable[[float], object] | None) -> None:
        super().__init__()
        self._total = max(total, 1)
        self._done = 0
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """The value of an item that is about to be written."""
        value = super().resolve_data(write_item)
        if self._progress is not None and isinstance(value, Tensor):
            self._done += value.nbytes
            self._progress(self._done / self._total / 2)
        return value
