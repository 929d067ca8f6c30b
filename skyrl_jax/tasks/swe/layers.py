"""Host directories that are laid over the sandbox image: the tools, and a task's repository."""

from __future__ import annotations

import hashlib
import os
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path

TOOLS = (
    "swe_runner.py",
    "swe_check.py",
    "swe_edit.py",
    "swe_grade.py",
    "swe_change.py",
    "swe_pytest.py",
    "runner.py",
    "edit.py",
    "grade.py",
)
GUEST = Path(__file__).parent / "guest"


def tools_digest() -> str:
    """Return the identity of the guest programs."""
    texts = b"".join((GUEST / name).read_bytes() for name in TOOLS)
    return hashlib.sha256(texts).hexdigest()[:16]


def make_tools_layer(cache: Path) -> Path:
    """Return the layer with ``/opt/swe``: programs and their bytecode, not writable inside.

    The bytecode is used when the image has this Python version, and ignored otherwise.
    """
    layer = cache / f"tools-{tools_digest()}"
    return layer if layer.is_dir() else build_once(layer, _write_tools)


def build_once(layer: Path, build: Callable[[Path], None]) -> Path:
    """Build a directory beside its place and rename it there, so that it is whole or absent."""
    layer.parent.mkdir(parents=True, exist_ok=True)
    draft = layer.with_name(f".{layer.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    draft.chmod(0o755)
    try:
        build(draft)
        draft.rename(layer)
    except OSError:
        if not layer.is_dir():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return layer


def _write_tools(draft: Path) -> None:
    target = draft / "opt" / "swe"
    target.mkdir(parents=True)
    for name in TOOLS:
        copy = target / name
        shutil.copyfile(GUEST / name, copy)
        copy.chmod(0o644)
        if name.startswith("swe_"):
            made = py_compile.compile(
                str(copy),
                dfile=f"/opt/swe/{name}",
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            Path(str(made)).chmod(0o644)
    for folder in (draft / "opt", target, target / "__pycache__"):
        folder.chmod(0o755)
