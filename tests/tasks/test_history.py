"""No future in a repository: names, reflog, stash and packed objects beyond the base are gone."""

import subprocess

import pytest

from skyrl_jax.core.errors import ImageError
from skyrl_jax.tasks.swe.history import scrub_history

WHO = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "safe.directory=*")


def git(root, *command):
    done = subprocess.run(
        ["git", *WHO, *command], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A base commit, and the solution under every name that git has for it."""
    git(tmp_path, "init", "-q", "-b", "dev", ".")
    (tmp_path / "a.txt").write_text("before\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "older")
    (tmp_path / "a.txt").write_text("base\n")
    git(tmp_path, "commit", "-q", "-a", "-m", "base")
    base = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "a.txt").write_text("the solution\n")
    git(tmp_path, "commit", "-q", "-a", "-m", "solution")
    git(tmp_path, "tag", "-a", "v2", "-m", "two")
    git(tmp_path, "branch", "future")
    git(tmp_path, "remote", "add", "origin", "https://example.org/x.git")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    (tmp_path / "a.txt").write_text("stashed solution\n")
    git(tmp_path, "stash", "-q")
    git(tmp_path, "gc", "-q")
    git(tmp_path, "reset", "-q", "--hard", base)
    return tmp_path, base


def everything(root):
    """Return the text of all objects, reachable or not."""
    names = git(root, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    return "\n".join(git(root, "cat-file", "-p", name) for name in names)


def test_only_the_base_and_its_past_are_left(repository):
    root, base = repository
    assert "solution" in everything(root)
    scrub_history(root, base)
    assert "solution" not in everything(root)
    assert git(root, "log", "--all", "--format=%s") == "base\nolder"
    assert git(root, "rev-parse", "HEAD") == base
    assert git(root, "status", "--porcelain") == "" and git(root, "remote") == ""
    assert git(root, "reflog", "--all") == "" and git(root, "tag") == ""
    git(root, "fsck", "--strict")  # no commit graph names what is gone
    scrub_history(root, base)  # a second time changes nothing
    assert git(root, "rev-parse", "main") == base


def test_what_a_repository_borrows_is_cut_off(repository, tmp_path_factory):
    root, base = repository
    copy = tmp_path_factory.mktemp("borrower") / "copy"
    git(root, "clone", "-q", "--shared", "--no-checkout", str(root), str(copy))
    assert (copy / ".git/objects/info/alternates").exists()
    scrub_history(copy, base)
    assert not (copy / ".git/objects/info/alternates").exists()
    assert "solution" not in everything(copy) and git(copy, "show", f"{base}:a.txt") == "base"


def test_an_unknown_commit_changes_nothing(repository):
    root, _ = repository
    with pytest.raises(ImageError, match="cat-file"):
        scrub_history(root, "0" * 40)
    assert git(root, "tag") == "v2"
