"""An open GGUF file: its keys with checked types, its tensors by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.core.errors import ConfigError, WeightsError


class GgufFile:
    """The keys and tensors of one file; tensor data stays on disk until it is read.

    ``tensors`` maps a name to PyPI gguf's ReaderTensor: data, tensor_type, and shape with the
    fastest dimension first.

    Args:
        path: the file.

    Raises:
        ConfigError: the package gguf is not installed.
        WeightsError: the file cannot be read, or is cut short.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ConfigError(
                "reading a GGUF file needs the package gguf: pip install 'skyrl_jax[gguf]'"
            ) from error
        self.path = Path(path)
        try:
            reader = GGUFReader(self.path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise WeightsError(
                f"cannot read {self.path} as GGUF: {error}; it must be a whole .gguf file"
            ) from error
        self.fields: dict[str, Any] = dict(reader.fields)
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of a key; without a default the key must be there.

        Raises:
            WeightsError: the key is missing or has another type; names it.
        """
        field = self.fields.get(key)
        found = default if field is None else field.contents()
        if found is None:
            raise WeightsError(f"{self.path}: the file lacks key {key!r}")
        if field is not None and isinstance(found, float) and field.types[-1].name == "FLOAT32":
            # the shortest decimal: 1e-05 was written, 9.99999974e-06 is its nearest float32
            found = float(str(np.float32(found)))
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise WeightsError(
                f"{self.path}: key {key!r} must be {kind.__name__}, it is {str(found)[:80]}"
            )
        return found
