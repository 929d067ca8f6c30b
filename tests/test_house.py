"""The house rules as tests: floors and wings, lint, types, set-up on a bare machine."""

import os
import shutil
import subprocess
import sys
import tempfile
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
        ("gateway/extra.py", "import skyrl_jax.rl", "the actor wing never imports"),
        ("gateway/extra.py", "import jax", "no accelerator library"),
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


def _path_without(folder: Path, *absent: str) -> str:
    """Return a PATH of one folder that holds what .ci/setup calls, but not the named commands."""
    folder.mkdir()
    for name in ("bash", "dirname", "id", "env", "bwrap", "git", "gcc"):
        if name not in absent:
            (folder / name).symlink_to(shutil.which(name))
    (folder / "python3.11").symlink_to(sys.executable)
    return str(folder)


def test_a_user_without_root_is_told_the_missing_packages_in_one_line(repo_root):
    """A plain user cannot install them, so `make setup` names what root has to install."""
    # Not tmp_path: its parents are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        tree.chmod(0o755)
        (tree / ".ci").mkdir()
        shutil.copy(repo_root / ".ci" / "setup", tree / ".ci")
        env = {"PATH": _path_without(tree / "bin", "bwrap", "git"), "STDIO_H": f"{name}/absent.h"}
        as_user = [shutil.which("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
        prefix = as_user if os.geteuid() == 0 else []
        result = _run([*prefix, shutil.which("bash"), f"{name}/.ci/setup"], tree, env)
    assert result.returncode == 1
    lines = (result.stdout + result.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    missing = lines[0].split("packages: ")[1].split(" (")[0].split()
    assert {"bubblewrap", "git", "libc6-dev"} <= set(missing)
    assert "gcc" not in missing
