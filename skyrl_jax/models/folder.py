"""A folder that appears under its name only when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder to write files into; at the end it takes the name ``directory``.

    The files are on disk before the rename. A folder of that name is replaced; an error inside the
    block leaves it as it was.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
        temporary.chmod(0o755)
        _replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    # A folder that is not empty cannot be renamed over: move it aside first.
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(aside / "old")
    temporary.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
