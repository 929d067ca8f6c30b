"""Compiles the sandbox's two static C programs on demand, once per source text."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from skyrl_jax.core.errors import InfraError

_SOURCES = Path(__file__).parent / "native"
_PROGRAMS = {
    "supervisor": ("supervisor.c", "filter.c", "tree.c", "wire.c"),
    "launcher": ("launcher.c", "wire.c"),
}
_COMPILE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePrograms:
    """Paths of the compiled programs. ``layer`` holds only /.skyrl."""

    launcher: Path
    supervisor: Path
    layer: Path


def build_native(cache_dir: Path) -> NativePrograms:
    """Return the compiled launcher and supervisor, compiling them when the sources changed.

    Args:
        cache_dir: where compiled programs are kept (``native/<hash of the sources>/``).

    Raises:
        InfraError: no C compiler, or the compiler failed; the message says what to install.
    """
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            digest.update(source.name.encode() + source.read_bytes())
    target = (cache_dir / "native" / digest.hexdigest()[:16]).resolve()
    if not target.exists():
        _compile_into(target)
    layer = target / "layer"
    return NativePrograms(
        launcher=target / "launcher", supervisor=layer / ".skyrl" / "supervisor", layer=layer
    )


def _compile_into(target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise InfraError(
            "no C compiler: the sandbox supervisor is compiled on first use; "
            "install the Debian packages gcc and libc6-dev",
            cause="compiler",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
    try:
        for name, sources in _PROGRAMS.items():
            command = [compiler, "-O2", "-static", "-s", "-o", str(scratch / name)]
            command += [str(_SOURCES / source) for source in sources]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
            if done.returncode:
                raise InfraError(
                    f"cannot compile the sandbox {name} (are the Debian packages gcc and "
                    f"libc6-dev installed?): {done.stderr.strip()[-2000:]}",
                    cause="compiler",
                )
        home = scratch / "layer" / ".skyrl"
        (home / "host").mkdir(parents=True)  # what SandboxSpec.shared is bound to
        (scratch / "supervisor").rename(home / "supervisor")
        for path in (scratch, scratch / "layer", home, home / "host", home / "supervisor"):
            path.chmod(0o755)
        os.rename(scratch, target)
    except OSError as error:
        if not target.exists():  # else: another process finished the same build first
            raise InfraError(f"cannot write {target}: {error}", cause="compiler") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
