"""Layers that travel: a directory as a tar stream named by its SHA-256, and a host's store of them.

The stream is the same for the same content: sorted names, whole seconds, owners as numbers. A plain
user's files travel as the commands' uid's (they own them in that user's own sandboxes, too).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from skyrl_jax.core.errors import CapacityError, DataError, ImageError
from skyrl_jax.sandbox.bwrap import AGENT_UID
from skyrl_jax.sandbox.cgroup import run_name, sweep_folders

_STORE = "skyrl-layers-"
_MODES = 0o1777  # no set-id bit comes from a client


class HashingFile:
    """A file to write to that hashes and counts what it passes on (``None``: only that)."""

    def __init__(self, target: BinaryIO | None = None) -> None:
        """Start with nothing."""
        self.size = 0
        self._digest = hashlib.sha256()
        self._target = target

    def write(self, data: bytes) -> int:
        """Hash and pass on."""
        self.size += len(data)
        self._digest.update(data)
        if self._target is not None:
            self._target.write(data)
        return len(data)

    def hexdigest(self) -> str:
        """Return the SHA-256 of everything written."""
        return self._digest.hexdigest()


def write_layer(layer: Path, target: Any) -> None:
    """Write a layer's tar stream. Blocks: call it in a thread.

    Raises:
        ImageError: the layer is no directory, or holds a device, pipe or socket.
    """
    if not layer.is_dir():
        raise ImageError(f"sandbox layer {layer} is not a directory")
    plain_user = os.geteuid() != 0
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in _walk(layer):
            name = os.path.relpath(path, layer)
            try:
                _add(archive, path, name, plain_user)
            except OSError as error:
                raise ImageError(f"cannot read {path} of a sandbox layer: {error}") from error


def _walk(layer: Path) -> Iterator[str]:
    yield str(layer)
    for directory, names, files in os.walk(layer):
        names.sort()
        for name in sorted([*names, *files]):
            yield os.path.join(directory, name)


def _add(archive: tarfile.TarFile, path: str, name: str, plain_user: bool) -> None:
    info = os.lstat(path)
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(info.st_mode) & _MODES
    member.mtime = int(info.st_mtime)
    owner = AGENT_UID if plain_user else info.st_uid
    member.uid, member.gid = owner, AGENT_UID if plain_user else info.st_gid
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(member)
    elif stat.S_ISREG(info.st_mode):
        with open(path, "rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            archive.addfile(member, file)
    else:
        raise ImageError(f"sandbox layer: {path} is a device, pipe or socket: it cannot travel")


def layer_digest(layer: Path) -> str:
    """Return the SHA-256 of a layer's tar stream. Blocks: call it in a thread."""
    sink = HashingFile()
    write_layer(layer, sink)
    return sink.hexdigest()


class LayerStore:
    """A host's directories of layers by digest, with a bound; those in use are never dropped.

    Args:
        max_bytes: of all layers' tar streams together.
        folder: where they lie; ``None`` makes a temporary folder that goes with this process.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        """Make the folder; remove those of dead hosts."""
        sweep_folders(_STORE)
        made = tempfile.mkdtemp(prefix=_STORE, suffix=f".{run_name('host')}", dir=folder)
        self._folder = Path(made)
        os.chmod(made, 0o755)
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}  # least recently used first
        self._used: Counter[str] = Counter()
        self._adding = asyncio.Lock()

    @property
    def digests(self) -> tuple[str, ...]:
        """The layers that are here."""
        return tuple(self._sizes)

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Return those that must be sent first."""
        return sorted({digest for digest in digests if digest not in self._sizes})

    def pin(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Return the directories of layers, which stay until ``unpin``."""
        for digest in digests:
            self._sizes[digest] = self._sizes.pop(digest)
            self._used[digest] += 1
        return tuple(str(self._folder / digest) for digest in digests)

    def unpin(self, digests: Sequence[str]) -> None:
        """Give the layers of one sandbox free."""
        self._used.subtract(digests)
        self._used += Counter()  # forget what fell to 0

    def new_file(self) -> tuple[BinaryIO, Path]:
        """Return a file for an arriving stream, and its path."""
        fd, path = tempfile.mkstemp(prefix="arriving-", dir=self._folder)
        return cast(BinaryIO, os.fdopen(fd, "wb")), Path(path)

    async def add(self, digest: str, tar: Path, size: int) -> None:
        """Unpack a stream whose hash has been checked; room is made for it first.

        Raises:
            CapacityError: the layers in use leave no room.
            DataError: the stream is no tar, or leaves its directory.
        """
        async with self._adding:
            if digest in self._sizes:
                return
            await self._make_room(size)
            target = self._folder / f"unpacking-{digest}"
            try:
                await asyncio.to_thread(_unpack, tar, target)
                os.rename(target, self._folder / digest)
            finally:
                await asyncio.to_thread(shutil.rmtree, target, True)
            self._sizes[digest] = size

    async def _make_room(self, size: int) -> None:
        for old in list(self._sizes):
            if sum(self._sizes.values()) + size <= self._max_bytes:
                return
            if not self._used[old]:
                del self._sizes[old]
                await asyncio.to_thread(shutil.rmtree, self._folder / old, True)
        total = sum(self._sizes.values())
        if total + size > self._max_bytes:
            raise CapacityError(
                f"no room for a layer of {size} bytes: layers in use hold {total} of "
                f"{self._max_bytes} (sandbox_host --layer_mb)"
            )

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _unpack(tar: Path, target: Path) -> None:
    root = os.geteuid() == 0

    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        if not (member.isdir() or member.isreg() or member.issym()):
            raise DataError(f"layer member {member.name!r} is no file, directory or symbolic link")
        safe = tarfile.tar_filter(member, path)  # refuses what leaves the directory
        found = safe.replace(mode=member.mode & _MODES, deep=False)
        if not root:
            found.uid, found.gid = os.geteuid(), os.getegid()
        return found

    try:
        target.mkdir()
        with tarfile.open(tar) as archive:
            archive.extractall(target, numeric_owner=True, filter=checked)
    except (tarfile.TarError, ValueError) as error:
        raise DataError(f"a layer cannot be unpacked: {error}") from error
    except OSError as error:
        raise CapacityError(f"a layer cannot be unpacked: {error}") from error


@contextlib.contextmanager
def layer_file(layer: Path) -> Iterator[Path]:
    """Write a layer's tar stream to a temporary file, which goes with the block. Blocks."""
    with tempfile.TemporaryDirectory(prefix="skyrl-layer-") as folder:
        path = Path(folder) / "layer.tar"
        with open(path, "wb") as file:
            write_layer(layer, file)
        yield path
