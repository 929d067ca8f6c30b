"""Layers with an agent's packages, made once in a cache and laid over the image, read-only.

A layer holds ``/opt/agent/site`` (what pip installed there), ``/opt/agent/lib`` (the C++ library)
and, where the scaffold needs another Python than the image has, ``/opt/agent/python`` (a copy of
one of this machine). Nothing of them belongs to this project's own environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from skyrl_jax.core.errors import ImageError

SITE = "/opt/agent/site"
PYTHON = "/opt/agent/python"
LIBRARIES = "/opt/agent/lib"  # shared libraries that wheels expect and the base image has not
# The environment of a program that uses such a layer.
LAYER_ENV = {"PYTHONPATH": SITE, "LD_LIBRARY_PATH": f"{LIBRARIES}:{PYTHON}/lib"}
_COPIED = ("libstdc++.so.6", "libgcc_s.so.1")
_LIBRARY_FOLDERS = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib")
_INSTALL_TIMEOUT_S = 1800
_SKIPPED = shutil.ignore_patterns(
    "test", "tests", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo", "site-packages",
    "__pycache__", "*.a", "share", "include", "pkgconfig",
)  # fmt: skip


def packages_layer(
    name: str, requirements: Sequence[str], cache: Path, *, python: str = ""
) -> Path:
    """Return the layer of a scaffold, installing it when it is not there yet (minutes).

    Args:
        name: part of the folder's name.
        requirements: what pip installs; pinned.
        cache: layers are kept in ``agents/`` below it.
        python: interpreter whose version the packages are for, and which is copied into the layer;
            "" = the one that runs us, which the base image has already.

    Raises:
        ImageError: pip failed; its last lines say why.
    """
    text = "\n".join([python or sys.version, *requirements])
    layer = cache / "agents" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if layer.is_dir():
        return layer
    layer.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=layer.parent))
    try:
        _install(requirements, draft / SITE.lstrip("/"), python or sys.executable)
        _copy_libraries(draft / LIBRARIES.lstrip("/"))
        if python:
            _copy_python(python, draft / PYTHON.lstrip("/"))
        _open_to_all(draft)
        draft.rename(layer)
    except OSError as error:
        if not layer.is_dir():  # else: another process was first
            raise ImageError(f"cannot make the layer of {name}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return layer


def find_python(version: str) -> str:
    """Return an interpreter of a version, e.g. "3.12": the one in PATH, or one of pyenv's.

    Raises:
        ImageError: there is none.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    tried = [shutil.which(f"python{version}") or ""]
    tried += map(str, sorted(root.glob(f"versions/{version}*/bin/python{version}")))
    for name in filter(None, tried):  # a shim of pyenv may stand in PATH and lead nowhere
        command = [name, "-c", "import sys; print(sys.executable)"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    raise ImageError(f"there is no python{version} in PATH or in {root}: install one")


def _install(requirements: Sequence[str], site: Path, python: str) -> None:
    site.mkdir(parents=True)
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--target", str(site), *requirements]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        text = f"pip install of {requirements[0]} took over {error.timeout:.0f} s"
        raise ImageError(text) from None
    if done.returncode:
        raise ImageError(
            f"pip install of {', '.join(requirements)} failed: {done.stderr.strip()[-1000:]}"
        )


def _copy_libraries(target: Path) -> None:
    target.mkdir(parents=True)
    for name in _COPIED:  # a wheel that needs one that is nowhere says so itself
        found = [Path(folder, name) for folder in _LIBRARY_FOLDERS if Path(folder, name).exists()]
        if found:
            shutil.copy(found[0], target / name)


def _copy_python(python: str, target: Path) -> None:
    question = "import sys; print(sys.base_prefix, '%d.%d' % sys.version_info[:2])"
    answer = subprocess.run(
        [python, "-c", question], capture_output=True, text=True, timeout=60, check=True
    )
    prefix, version = answer.stdout.split()
    name = f"python{version}"
    (target / "bin").mkdir(parents=True)
    shutil.copy(Path(prefix, "bin", name), target / "bin" / name)
    (target / "bin" / "python3").symlink_to(name)
    (target / "lib").mkdir()
    for library in Path(prefix, "lib").glob(f"lib{name}.so*"):  # where it is built with one
        shutil.copy(library, target / "lib" / library.name)
    shutil.copytree(
        Path(prefix, "lib", name), target / "lib" / name, symlinks=True, ignore=_SKIPPED
    )


def _open_to_all(draft: Path) -> None:
    """Make every file readable: the program's uid owns none of them."""
    for folder, _, names in os.walk(draft):
        os.chmod(folder, 0o755)
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444)
