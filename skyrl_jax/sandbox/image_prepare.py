"""What is done to an image once before agents use it, as a script that runs in a container of it.

The image holds a task's repository. Its history is cut at the base commit: branches, tags, remotes,
reflogs, hooks and every object that the base commit does not reach are gone. What the image changed
on top of it (files of its environment, tracked or not) becomes one commit with a fixed date. Then
the tree is given to the uid of the agent's commands. The result is committed as an image.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from skyrl_jax.core.errors import ImageError

# $1: the tree, $2: the base commit. Exit codes: see _CODES. Only what POSIX sh and git >= 2.6 have.
SCRIPT = r"""
set -eu
cd "$1" 2>/dev/null || exit 11
command -v git >/dev/null 2>&1 || exit 12
export HOME=/tmp/.skyrl-prepare GIT_CONFIG_NOSYSTEM=1 LC_ALL=C
rm -rf "$HOME" && mkdir -m 700 "$HOME"
printf '[safe]\n\tdirectory = *\n[gc]\n\tauto = 0\n[core]\n\thooksPath = /dev/null\n' \
    >"$HOME/.gitconfig"
[ -d .git ] || exit 13
base=$(git rev-parse --verify -q "$2^{commit}") || exit 14
git merge-base --is-ancestor "$base" HEAD || exit 15
export GIT_AUTHOR_NAME=skyrl GIT_AUTHOR_EMAIL=skyrl@localhost GIT_COMMITTER_NAME=skyrl
export GIT_COMMITTER_EMAIL=skyrl@localhost GIT_AUTHOR_DATE='1700000000 +0000'
export GIT_COMMITTER_DATE='1700000000 +0000'
rm -f .git/index.lock .git/*_HEAD
rm -rf .git/hooks .git/logs .git/rebase-apply .git/rebase-merge .git/worktrees
git add -A >/dev/null 2>&1 || exit 16
tree=$(git write-tree)
commit=$base
if [ "$tree" != "$(git rev-parse "$base^{tree}")" ]; then
    commit=$(git commit-tree -p "$base" -m 'Environment of the image' "$tree")
fi
for remote in $(git remote); do git remote remove "$remote"; done
rm -f .git/refs/stash
git for-each-ref --format='delete %(refname)' >"$HOME/refs"
git symbolic-ref HEAD refs/heads/skyrl-none
git update-ref --stdin <"$HOME/refs"
git update-ref refs/heads/main "$commit"
git symbolic-ref HEAD refs/heads/main
rm -rf .git/logs
git read-tree "$commit"
git update-index -q --refresh >/dev/null 2>&1 || true
git repack -a -d -q
rm -rf .git/objects/info/alternates .git/objects/info/commit-graph .git/objects/info/commit-graphs
git prune --expire=now
rm -rf .git/logs .git/packed-refs.lock
git cat-file --batch-all-objects --batch-check='%(objecttype)' >"$HOME/types"
[ "$(grep -c '^commit' "$HOME/types")" = "$(git rev-list --count HEAD)" ] || exit 17
! grep -q '^tag' "$HOME/types" || exit 17
path=
for folder in .venv/bin /opt/miniconda3/envs/testbed/bin; do
    case $folder in /*) full=$folder ;; *) full=$1/$folder ;; esac
    if [ -x "$full/python" ]; then path=$full; break; fi
done
rm -rf "$HOME"
chown -R 1:1 "$1"
echo "skyrl-prepared commit=$commit path=$path"
"""
_CODES = {
    11: "it has no folder {workdir}",
    12: "it has no git",
    13: "{workdir} is no git repository",
    14: "the repository in {workdir} does not have the base commit {commit}",
    15: "HEAD of {workdir} does not come from the base commit {commit}",
    16: "git add failed in {workdir}",
    17: "the history beyond the base commit could not be removed",
    126: "its /bin/sh does not run here",
    127: "it has no /bin/sh",
}
_LINE = re.compile(r"skyrl-prepared commit=([0-9a-f]{40,64}) path=(/[\w./-]*|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An image that is ready for agents.

    Args:
        image: its tag or id; "" = it could not be had, ``why_not``.
        commit: HEAD of the tree, which diffs are made against.
        path: a folder of the task's own Python, for PATH ("" = none).
    """

    image: str
    commit: str = ""
    path: str = ""
    why_not: str = ""


def read_outcome(code: int, output: str, *, image: str, workdir: str, commit: str) -> Prepared:
    """Turn the script's exit code and output into a value.

    Raises:
        ImageError: the image cannot be used; the message says why.
    """
    found = _LINE.search(output) if code == 0 else None
    if found is None:
        last = (output.strip().splitlines() or ["no output"])[-1][:300]
        why = _CODES.get(code, f"its preparation ended with code {code}: {last}")
        raise ImageError(f"image {image}: " + why.format(workdir=workdir, commit=commit))
    return Prepared(image="", commit=found[1], path=found[2])
