"""Git history without the future: a repository keeps what its base commit reaches, nothing else.

A task's repository may hold its own solution: later commits under branches, tags, remotes and
stashes, in the reflog, or as objects that no name reaches any more but a pack still holds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from skyrl_jax.core.errors import ImageError

_TIMEOUT_S = 600
# Names of commits, and places where commits are remembered; info/grafts changes what is reached.
_FORGOTTEN = (
    "refs",
    "packed-refs",
    "logs",
    "worktrees",
    "hooks",
    "info/grafts",
    "objects/info/commit-graph",
    "objects/info/commit-graphs",
    "ORIG_HEAD",
    "FETCH_HEAD",
    "MERGE_HEAD",
    "CHERRY_PICK_HEAD",
    "REVERT_HEAD",
    "BISECT_LOG",
    "COMMIT_EDITMSG",
)
_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ["PATH"]}


def scrub_history(repository: Path, base: str) -> None:
    """Leave ``base`` as the only head of a repository, with nothing that it does not reach.

    The working tree stays as it is; the index becomes that of ``base``.

    Args:
        repository: folder that holds ``.git``.
        base: the commit to keep, a full id.

    Raises:
        ImageError: git failed, or an object is left that ``base`` does not reach.
    """
    git = repository / ".git"
    _run(repository, "cat-file", "-e", f"{base}^{{commit}}")
    for name in _FORGOTTEN:
        place = git / name
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    (git / "refs" / "heads").mkdir(parents=True)
    for keep in (git / "objects" / "pack").glob("*.keep"):
        keep.unlink()
    for section in _remotes(repository):
        _run(repository, "config", "--remove-section", section)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    _run(repository, "update-ref", "refs/heads/main", base)
    _run(repository, "read-tree", base)
    _run(repository, "repack", "-a", "-d", "-q")  # what an alternate lends is copied
    (git / "objects" / "info" / "alternates").unlink(missing_ok=True)
    _run(repository, "prune", "--expire=now")
    left = _objects(repository, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    reached = _objects(repository, "rev-list", "--objects", "--no-object-names", "HEAD")
    if left != reached:
        raise ImageError(
            f"{repository.name}: {len(left ^ reached)} objects differ from what {base[:12]} "
            "reaches after the history was scrubbed"
        )


def _remotes(repository: Path) -> list[str]:
    """Return the configuration sections that name where commits come from."""
    names = _run(repository, "config", "--local", "--name-only", "--list").splitlines()
    sections = {name.rpartition(".")[0] for name in names}
    return sorted(name for name in sections if name.startswith(("remote.", "branch.")))


def _objects(repository: Path, *command: str) -> set[str]:
    return set(_run(repository, *command).split())


def _run(repository: Path, *command: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "-c", "core.logAllRefUpdates=false", *command],
            cwd=repository,
            env=_ENV,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", "") or str(error)
        raise ImageError(f"git {command[0]} failed in {repository.name}: {text.strip()}") from error
    return done.stdout
