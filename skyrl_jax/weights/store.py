"""Versioned weights on disk: one folder a version, visible only when complete.

    ROOT/v000003/orbax/...       what the publisher wrote
    ROOT/v000003/manifest.json   its facts, and {relative path: sha256} of every file
    ROOT/v000003/COMPLETE        written last, after everything else reached the disk

A folder without COMPLETE is half-written: nobody reads it, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from skyrl_jax.core.errors import WeightsError
from skyrl_jax.core.types import WeightVersion

MARKER = "COMPLETE"
MANIFEST = "manifest.json"
PARAMS = "orbax"
_NO_SPACE = "No space left"
_NAME = re.compile(r"v(\d{6,})\Z")


class FolderStore:
    """The WeightStore of a directory (local disk, NFS or a mounted bucket).

    Args:
        root: the directory; made when missing.
        keep: complete versions to keep; older ones are removed after each publish.
    """

    def __init__(self, root: Path | str, *, keep: int = 3) -> None:
        if keep < 1:
            raise WeightsError(f"a weight store must keep at least 1 version, got {keep}")
        self.root = Path(root)
        self._keep = keep
        self.root.mkdir(parents=True, exist_ok=True)

    def publish(
        self, number: int, params: Callable[[Path], None], manifest: Mapping[str, Any]
    ) -> WeightVersion:
        """Write a version.

        Args:
            number: its number. One that is complete already is replaced (a resumed run publishes
                the version it restored once more).
            params: writes the parameters into the folder it is given (which does not exist yet);
                the store itself knows no array library.
            manifest: facts to keep beside them.

        Raises:
            WeightsError: the disk is full or refuses the write; complete versions stay.
        """
        folder = self.root / f"v{number:06d}"
        try:
            self._write(folder, number, params, manifest)
        except (OSError, ValueError, RuntimeError) as error:  # array libraries raise all three
            if not isinstance(error, OSError) and _NO_SPACE not in str(error):
                raise
            self._give_up(folder, number, error)
        self._prune(number)
        return WeightVersion(number=number, path=folder)

    def _write(
        self,
        folder: Path,
        number: int,
        params: Callable[[Path], None],
        manifest: Mapping[str, Any],
    ) -> None:
        # the marker goes first: a crash while we remove the rest leaves no version, not a torn one
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        params(folder / PARAMS)
        files = {
            str(path.relative_to(folder)): _digest(path)
            for path in sorted((folder / PARAMS).rglob("*"))
            if path.is_file()
        }
        text = json.dumps({**manifest, "version": number, "files": files}, indent=1)
        (folder / MANIFEST).write_text(text)
        _sync_tree(folder)
        (folder / MARKER).write_text(f"{number}\n")
        _sync(folder / MARKER)
        _sync(folder)
        _sync(self.root)

    def _give_up(self, folder: Path, number: int, error: Exception) -> NoReturn:
        """Remove what a failed write left, and say what is wrong."""
        with contextlib.suppress(OSError):
            (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        text = str(error)
        full = getattr(error, "errno", None) == errno.ENOSPC or _NO_SPACE in text
        cause = f"the disk under {self.root} is full" if full else text.splitlines()[0][:300]
        good = self.latest()
        stays = f"the last complete one is {good.number}" if good else "there is no complete one"
        raise WeightsError(f"cannot write weight version {number}: {cause}; {stays}") from error

    def latest(self) -> WeightVersion | None:
        """Return the newest complete version, or ``None``."""
        versions = self.versions()
        return versions[-1] if versions else None

    def versions(self) -> list[WeightVersion]:
        """Return the complete versions, oldest first."""
        found = [
            WeightVersion(number=int(match[1]), path=path)
            for path in self.root.iterdir()
            if (match := _NAME.match(path.name)) and (path / MARKER).is_file()
        ]
        return sorted(found, key=lambda version: version.number)

    def version(self, number: int) -> WeightVersion:
        """Return one complete version.

        Raises:
            WeightsError: there is none of that number.
        """
        for version in self.versions():
            if version.number == number:
                return version
        have = ", ".join(str(v.number) for v in self.versions()) or "none"
        raise WeightsError(f"{self.root} has no complete weight version {number}; it has: {have}")

    def manifest(self, version: WeightVersion) -> dict[str, Any]:
        """Return a version's manifest after checking every file against it.

        Raises:
            WeightsError: a file is missing or differs from what was published.
        """
        try:
            manifest = json.loads((version.path / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise WeightsError(f"cannot read {version.path / MANIFEST}: {error}") from error
        for name, digest in manifest["files"].items():
            path = version.path / name
            if not path.is_file():
                raise WeightsError(f"weight version {version.number} lacks its file {name}")
            if _digest(path) != digest:
                raise WeightsError(
                    f"weight version {version.number}: {name} is not what was published "
                    "(sha256 differs)"
                )
        return manifest

    def sweep(self) -> list[Path]:
        """Remove half-written versions; only the one writer may call this, at its start."""
        partial = [
            path
            for path in self.root.iterdir()
            if _NAME.match(path.name) and not (path / MARKER).is_file()
        ]
        for path in partial:
            shutil.rmtree(path)
        return partial

    def discard_after(self, number: int) -> list[int]:
        """Remove versions newer than ``number``: a resumed run makes them again."""
        newer = [version for version in self.versions() if version.number > number]
        for version in newer:
            self._remove(version)
        return [version.number for version in newer]

    def _prune(self, newest: int) -> None:
        older = [version for version in self.versions() if version.number <= newest]
        for version in older[: -self._keep]:
            self._remove(version)

    @staticmethod
    def _remove(version: WeightVersion) -> None:
        (version.path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(version.path, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)
