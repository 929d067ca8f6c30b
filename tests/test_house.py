"""The house rules as tests: floors and wings, lint, types, set-up on a bare machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def _run(
    argv: list[str], cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def _lint_imports(tree: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    return _run([str(BIN / "lint-imports"), "--no-cache"], tree, env)


def test_floors_and_wings_hold(repo_root):
    result = _lint_imports(repo_root)
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("core/types.py", "import skyrl_jax.batching", "Floors"),
        ("batching/extra.py", "import skyrl_jax.rl", "Floors"),
        ("sandbox/extra.py", "import skyrl_jax.models", "the actor wing never imports"),
        ("rl/extra.py", "import skyrl_jax.sandbox", "the learner wing never imports"),
        ("actor/extra.py", "import jax", "no accelerator library"),
        ("tasks/extra.py", "import orbax.checkpoint", "no accelerator library"),
        ("engine/extra.py", "import asyncio", "no event loop"),
        ("learner/extra.py", "import aiohttp", "no event loop"),
        ("learner/extra.py", "import flax.nnx", "Flax ends"),
        ("train/extra.py", "import ml_collections", "Only launchers/"),
        ("newpackage/__init__.py", "", "Floors"),
    ],
)
def test_a_wrong_import_breaks_its_contract(repo_root, tmp_path, module, line, contract):
    shutil.copytree(repo_root / "skyrl_jax", tmp_path / "skyrl_jax")
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    target = tmp_path / "skyrl_jax" / module
    target.parent.mkdir(exist_ok=True)
    with target.open("a") as file:
        file.write(f"\n{line}\n")
    result = _lint_imports(tmp_path)
    assert result.returncode != 0
    if line:
        broken = [row for row in result.stdout.splitlines() if row.rstrip().endswith("BROKEN")]
        assert any(contract in row for row in broken), result.stdout[-4000:]
    else:
        assert "newpackage" in result.stdout + result.stderr


def test_format(repo_root):
    result = _run([str(BIN / "ruff"), "format", "--check", "."], repo_root)
    assert result.returncode == 0, result.stdout[-4000:]


def test_lint(repo_root):
    result = _run([str(BIN / "ruff"), "check", "."], repo_root)
    assert result.returncode == 0, result.stdout[-4000:]


def test_types(repo_root):
    result = _run([str(BIN / "mypy")], repo_root)
    assert result.returncode == 0, result.stdout[-4000:]


def _path_with(tmp_path: Path, *absent: str) -> str:
    """A PATH of one folder that holds what .ci/setup calls, without the named commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "id", "bwrap", "git", "gcc", "env"):
        if name not in absent:
            (folder / name).symlink_to(shutil.which(name))
    (folder / "python3.11").symlink_to(sys.executable)
    folder.chmod(0o755)
    return str(folder)


def test_a_user_without_root_is_told_the_missing_packages_in_one_line(repo_root, tmp_path):
    """`make setup` cannot install for a plain user: one line names what root has to install."""
    tree = tmp_path / "tree"
    (tree / ".ci").mkdir(parents=True)
    shutil.copy(repo_root / ".ci" / "setup", tree / ".ci")
    path = _path_with(tmp_path, "bwrap", "git")
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == Path(tmp_path).owner() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
        if folder.parent == Path("/tmp"):
            break
    # No setpriv for a user without root: the test then is that user already.
    as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    prefix = as_user if os.geteuid() == 0 else []
    setpriv = [shutil.which(prefix[0]), *prefix[1:]] if prefix else []
    env = {"PATH": path, "STDIO_H": str(tmp_path / "absent.h")}
    result = _run([*setpriv, shutil.which("bash"), str(tree / ".ci" / "setup")], tmp_path, env)
    assert result.returncode != 0
    lines = (result.stdout + result.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    for package in ("bubblewrap", "git", "libc6-dev"):
        assert package in lines[0]
    assert "gcc" not in lines[0].replace("apt-get", "")
