"""Reads a checkpoint of torch.distributed.checkpoint without running what may be hidden in it.

The file ``.metadata`` is a pickle, and torch loads it as one. A pickle can name any function, which
is called when the pickle is loaded: whoever can write to the folder could run a program of his own.
Here the metadata may only name what the metadata of tensors consists of. Torch loads the tensors
themselves with ``weights_only``, but unpickles what is ``BytesStorageMetadata``: that is left out.
"""

import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata


def member(kind: type, name: str) -> Any:
    """How Python 3.11.0 to 3.11.3 pickle a member of an enumeration: as a call of getattr."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"expected no attribute of {kind}")
    return kind[name]


CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)
NAMES = {(kind.__module__, kind.__name__): kind for kind in CLASSES} | {
    ("torch", "float32"): torch.float32,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "getattr"): member,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # Python 3.13
}


class MetadataUnpickler(pickle._Unpickler):  # the one in Python, whose parts can be refined
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of the metadata of tensors")
        return NAMES[module, name]

    def load_build(self) -> None:
        # A pickle may set attributes of whatever it can name, of classes too.
        if type(self.stack[-2]) not in CLASSES:
            raise pickle.UnpicklingError(f"expected no state of {self.stack[-2]}")
        super().load_build()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


class SafeReader(dcp.FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # At once: dcp.load would log a traceback if it failed there.
        with (folder / ".metadata").open("rb") as file:
            self.metadata = MetadataUnpickler(file).load()

    def read_metadata(self) -> metadata.Metadata:
        return self.metadata
