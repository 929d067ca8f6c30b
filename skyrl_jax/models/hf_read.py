"""Reading a Hugging Face folder: checked by its headers first, then slice by slice.

    config.json + model.safetensors, or several files and model.safetensors.index.json

Nothing is read before every tensor is known to be there with the right shape; then each part of a
leaf is copied out of its files alone, so a host never holds more than the shards of its own devices
and a few windows of 8 MB. Reading needs no accelerator; only ``load_sharded`` imports jax.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import WeightsError
from skyrl_jax.models.families import param_shapes
from skyrl_jax.models.hf_config import check_same_model, load_config
from skyrl_jax.models.hf_tensors import DTYPES, HfTensor, Leaf, hf_table

INDEX = "model.safetensors.index.json"
# Pages that were read stay in the process's memory until their file is closed: files are opened
# anew after this many bytes.
_WINDOW_BYTES = 8 * 2**20
_ALIGNED = 64


class Stored(NamedTuple):
    """Where a tensor lies and what the header says of it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name


def load_hf(directory: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Read (ModelConfig, numpy params) from an HF folder, in the files' dtype.

    Raises:
        WeightsError: files are missing, unreadable or do not fit the config; names the tensor.
        ConfigError: config.json is not a model that this decoder computes.
    """
    cfg = load_config(directory)
    with Reader(directory, cfg) as reader:
        return cfg, {
            group: {
                name: reader.part((group, name), tuple(slice(0, n) for n in shape))
                for name, shape in leaves.items()
            }
            for group, leaves in param_shapes(cfg).items()
        }


def load_sharded(
    directory: str | os.PathLike[str], cfg: ModelConfig, shardings: Any, *, dtype: Any = None
) -> dict[str, Any]:
    """Read the params of an HF folder straight into sharded arrays.

    Every process calls this; each reads the slices that its own devices need and nothing else.

    Args:
        directory: the folder, on a disk that every process sees.
        cfg: the model that the folder must hold.
        shardings: a sharding per leaf (``models.sharding.param_shardings``).
        dtype: of the params; ``None`` = the files'.

    Raises:
        WeightsError: as ``load_hf``, before any device memory is taken; also another model's
            config.json.
    """
    import jax

    check_same_model(cfg, directory)

    def make(reader: Reader, leaf: Leaf, shape: tuple[int, ...]) -> Any:
        sharding = shardings[leaf[0]][leaf[1]]
        owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            owners.setdefault(bounds, []).append(device)
        shards = []
        for bounds, devices in owners.items():  # replicas on one host share a copy
            part = reader.part(leaf, tuple(slice(*b) for b in bounds), dtype)
            # waits for the transfer: the host's copy goes before the next part is read
            shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    with Reader(directory, cfg) as reader:
        return {
            group: {name: make(reader, (group, name), shape) for name, shape in leaves.items()}
            for group, leaves in param_shapes(cfg).items()
        }


class Reader:
    """Reads parts of our leaves out of a folder; a context manager that owns its open files.

    Args:
        directory: the folder.
        cfg: its model.

    Raises:
        WeightsError: the folder's tensors are not those of the model.
    """

    def __init__(self, directory: str | os.PathLike[str], cfg: ModelConfig) -> None:
        self._stored = stored_tensors(directory)
        check_tensors(directory, cfg, hf_table(cfg), self._stored)
        self._of_leaf: dict[Leaf, list[HfTensor]] = {}
        for tensor in hf_table(cfg):
            self._of_leaf.setdefault(tensor.leaf, []).append(tensor)
        self._open: dict[Path, Any] = {}
        self._touched = 0

    def __enter__(self) -> Reader:
        """Return self."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the files."""
        self._close()

    def part(self, leaf: Leaf, index: tuple[slice, ...], dtype: Any = None) -> np.ndarray:
        """Return ``leaf[index]``; every slice has a start and a stop.

        Where the tensors of one leaf differ in dtype, it comes in float32.
        """
        tensors = self._of_leaf[leaf]
        kinds = {self._stored[tensor.name].dtype for tensor in tensors}
        kind = DTYPES[kinds.pop()] if len(kinds) == 1 else np.dtype(np.float32)
        shape = tuple(s.stop - s.start for s in index)
        out = _room(shape, np.dtype(kind if dtype is None else dtype))
        for tensor in tensors:
            lead, rest = index[: len(tensor.index)], index[len(tensor.index) :]
            if not all(s.start <= i < s.stop for i, s in zip(tensor.index, lead, strict=True)):
                continue
            into = out[tuple(i - s.start for i, s in zip(tensor.index, lead, strict=True))]
            if tensor.transposed:
                self._copy(tensor, rest[::-1], into.T)
            else:
                self._copy(tensor, rest, into)
        return out

    def _copy(self, tensor: HfTensor, index: tuple[slice, ...], into: np.ndarray) -> None:
        """Copy ``tensor[index]`` into an array, a window of whole rows at a time.

        One tensor can be larger than all that a host may hold beside its shards (the embedding of
        Qwen3-8B is 1.2 GB in bfloat16).
        """
        width = int(np.prod(tensor.shape[1:], dtype=np.int64))  # a row is whole in the file
        width *= DTYPES[self._stored[tensor.name].dtype].itemsize
        step, first = max(1, _WINDOW_BYTES // width), index[0].start
        for start in range(first, index[0].stop, step):
            stop = min(start + step, index[0].stop)
            rows = self._read(tensor, (slice(start, stop), *index[1:]))
            into[start - first : stop - first] = rows
            self._touched += (stop - start) * width

    def _read(self, tensor: HfTensor, index: tuple[slice, ...]) -> np.ndarray:
        from safetensors import SafetensorError, safe_open

        stored = self._stored[tensor.name]
        if self._touched >= _WINDOW_BYTES:
            self._close()
        try:
            if stored.path not in self._open:
                self._open[stored.path] = safe_open(str(stored.path), framework="numpy")
            values: np.ndarray = self._open[stored.path].get_slice(tensor.name)[index]
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"cannot read tensor {tensor.name!r} of {stored.path}: {error}"
            ) from error
        return values

    def _close(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()
        self._touched = 0


def stored_tensors(directory: str | os.PathLike[str]) -> dict[str, Stored]:
    """Return what the headers of a folder's safetensors files say, by tensor name.

    Raises:
        WeightsError: no such files, one that cannot be read or is cut short, or a tensor in two.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Stored] = {}
    for path in _files(Path(directory)):
        try:
            with safe_open(str(path), framework="numpy") as handle:
                for name in handle.keys():
                    if name in found:
                        raise WeightsError(
                            f"tensor {name!r} is in {found[name].path.name} and in {path.name} of "
                            f"{directory}: remove the file that does not belong there"
                        )
                    view = handle.get_slice(name)
                    found[name] = Stored(path, tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"cannot read {path}: {error} (an incomplete file must be copied again)"
            ) from error
    return found


def check_tensors(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    table: Iterable[HfTensor],
    stored: Mapping[str, Stored],
) -> None:
    """Refuse a folder whose tensors are not exactly those of the model.

    Raises:
        WeightsError: names a tensor that is missing, unknown, of another shape or of a dtype that
            is not read, and what would be right.
    """
    left = set(stored)
    for tensor in table:
        there = stored.get(tensor.name)
        if there is None:
            hint = " (config.json says that it is not tied)" if "lm_head" in tensor.name else ""
            hint += _not_in_index(Path(directory), {tensor.path for tensor in stored.values()})
            raise WeightsError(
                f"{directory}: the weights lack tensor {tensor.name!r} of shape "
                f"{list(tensor.shape)}{hint}"
            )
        left.discard(tensor.name)
        if there.shape != tensor.shape:
            raise WeightsError(
                f"{there.path}: tensor {tensor.name!r} has shape {list(there.shape)}, the config "
                f"asks for {list(tensor.shape)}"
            )
        if there.dtype not in DTYPES:
            raise WeightsError(
                f"{there.path}: tensor {tensor.name!r} is stored as {there.dtype}; known: "
                f"{', '.join(DTYPES)}"
            )
    if cfg.tie_embeddings:
        left.discard("lm_head.weight")  # some exporters write the tied copy too
    left = {name for name in left if not name.endswith("rotary_emb.inv_freq")}  # of rope_theta
    if left:
        name = min(left)
        raise WeightsError(
            f"{stored[name].path}: the weights hold tensor {name!r}, which the model has not "
            f"(family {cfg.family!r}, {cfg.num_layers} layers)"
        )


def _files(directory: Path) -> list[Path]:
    """Return the files that the index names, or all where there is none."""
    index = directory / INDEX
    if not index.is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise WeightsError(f"{directory} holds no *.safetensors file")
        return paths
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("'weight_map' names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"cannot read {index}: {error!r}; it must hold {{'weight_map': {{tensor: file}}}}"
        ) from error
    for name in sorted(names):
        if not os.path.isfile(directory / name):  # Path.is_file raises where a name is too long
            raise WeightsError(f"{directory} lacks file {name[:200]!r}, which {INDEX} names")
    return [directory / name for name in sorted(names)]


def _not_in_index(directory: Path, read: set[Path]) -> str:
    """Say which files were not read since the index does not name them."""
    if not (directory / INDEX).is_file():
        return ""
    others = sorted(path.name for path in directory.glob("*.safetensors") if path not in read)
    return f" ({INDEX} does not name {', '.join(others)}: not read)" if others else ""


def _room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an empty array that begins at a multiple of 64 bytes.

    A CPU device of jax takes such memory as it is; other memory it copies, and while a leaf is
    placed it would be there twice.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)
