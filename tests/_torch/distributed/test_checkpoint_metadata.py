"""torch's table of contents is read without running anything."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from partita._torch.distributed.checkpoint_metadata import read_metadata, storage_place


def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    state = {"a": {"b": torch.zeros(2, dtype=torch.bfloat16)}, "n": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process.*")
        dcp.save(state, checkpoint_id=tmp_path)
    with (tmp_path / ".metadata").open("rb") as stream:
        metadata = read_metadata(stream)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata == theirs.state_dict_metadata
    assert metadata.storage_data == theirs.storage_data
    tensor = metadata.state_dict_metadata["a.b"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert tensor.properties.dtype is torch.bfloat16
    name, offset, length = storage_place(next(iter(metadata.storage_data.values())))
    assert (name, offset >= 0, length > 0) == ("__0_0.distcp", True, True)


@pytest.mark.parametrize("value", [print, Path, torch.zeros(1), pytest])
def test_nothing_else_is_let_in(value: object) -> None:
    text = b"cbuiltins\nprint\n." if value is pytest else pickle.dumps(value)
    with pytest.raises(pickle.UnpicklingError, match="is nothing that a table of contents is made of"):
        read_metadata(io.BytesIO(text))


def test_plain_data_is_no_table_of_contents() -> None:
    with pytest.raises(pickle.UnpicklingError, match="it holds a dict and no Metadata"):
        read_metadata(io.BytesIO(pickle.dumps({})))
    with pytest.raises(TypeError, match="a str does not say where"):
        storage_place("here")
