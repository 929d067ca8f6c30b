"""Repositories written without git are what git would have written."""

import subprocess

from skyrl_jax.tasks.swe.layers import make_tools_layer
from skyrl_jax.tasks.swe.repo import commit_id, make_layer, write_repository
from tests.tasks.worlds import rows

FILES = {"b.py": "x = 1\n", "a/b.py": "y\n", "a/c/d.py": "", "a.txt": "é\n", "a-b": "z\n"}


def git(folder, *command):
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def test_git_agrees_with_every_object(tmp_path):
    commit = write_repository(tmp_path, FILES)
    assert commit == commit_id(FILES) == git(tmp_path, "rev-parse", "HEAD")
    assert git(tmp_path, "fsck", "--strict", "--no-dangling") == ""
    assert git(tmp_path, "status", "--porcelain") == ""
    assert git(tmp_path, "ls-files").splitlines() == sorted(FILES)
    assert git(tmp_path, "rev-list", "--all", "--count") == "1"
    git(tmp_path, "add", "-A")
    assert git(tmp_path, "write-tree") == git(tmp_path, "rev-parse", "HEAD^{tree}")


def test_the_commit_depends_on_the_files_alone():
    assert commit_id(dict(reversed(FILES.items()))) == commit_id(FILES)
    assert commit_id({**FILES, "b.py": "x = 2\n"}) != commit_id(FILES)


def test_a_row_names_its_own_commit_and_its_patches_apply(tmp_path):
    for row in rows(4):
        folder = tmp_path / row.instance_id
        assert write_repository(folder, row.extra["files"]) == row.base_commit
        for name, patch in (("gold", row.patch), ("tests", row.test_patch)):
            (tmp_path / name).write_text(patch)
            git(folder, "apply", "--check", str(tmp_path / name))


def test_a_layer_is_made_once_and_holds_no_hidden_test(tmp_path):
    row = rows(1)[0]
    prepared = []
    layer = make_layer(tmp_path, row.extra["files"], prepared.append)
    assert make_layer(tmp_path, row.extra["files"], prepared.append) == layer
    assert len(prepared) == 1
    names = {str(path.relative_to(layer / "testbed")) for path in layer.rglob("*.py")}
    assert names == {name for name in row.extra["files"] if name.endswith(".py")}


def test_the_tools_layer_is_made_once(tmp_path):
    layer = make_tools_layer(tmp_path)
    assert make_tools_layer(tmp_path) == layer
    assert (layer / "opt/swe/runner.py").exists()
    assert list((layer / "opt/swe/__pycache__").glob("swe_runner*.pyc"))
