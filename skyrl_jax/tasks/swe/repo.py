"""Small git repositories written directly: objects, one commit, an index. No git process needed.

Everything is fixed (author, date, order), so the commit id depends on the files alone.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from skyrl_jax.tasks.swe.layers import build_once

AUTHOR = "skyrl-tasks <tasks@localhost> 1700000000 +0000"
WORKDIR = "testbed"  # where a task's tree lies inside a sandbox: /testbed
_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"

_Objects = dict[str, bytes]


def commit_id(files: Mapping[str, str]) -> str:
    """Return the id of the only commit of a repository that holds ``files``."""
    return _commit(files, {})


def write_repository(root: Path, files: Mapping[str, str]) -> str:
    """Write a working tree and its ``.git`` under ``root``; return the commit id."""
    objects: _Objects = {}
    commit = _commit(files, objects)
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
    git = root / ".git"
    for folder in ("objects", "refs/heads", "info"):
        (git / folder).mkdir(parents=True, exist_ok=True)
    for name, data in objects.items():
        target = git / "objects" / name[:2] / name[2:]
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(zlib.compress(data, 1))
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text(_CONFIG)
    (git / "refs/heads/main").write_text(commit + "\n")
    (git / "index").write_bytes(_index(files))
    return commit


def make_layer(
    cache: Path, files: Mapping[str, str], prepare: Callable[[Path], None] | None = None
) -> Path:
    """Return a directory to lay over an image: ``testbed/`` with the repository. Made once.

    Args:
        cache: where layers are kept, by commit id.
        files: the tree.
        prepare: gives the layer to the uid of the agent's commands (see sandbox/).
    """
    name = commit_id(files)
    layer = cache / name[:2] / name

    def build(draft: Path) -> None:
        write_repository(draft / WORKDIR, files)
        if prepare is not None:
            prepare(draft)

    return layer if layer.is_dir() else build_once(layer, build)


def _store(objects: _Objects, kind: str, body: bytes) -> str:
    data = f"{kind} {len(body)}".encode() + b"\0" + body
    name = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    objects[name] = data
    return name


def _commit(files: Mapping[str, str], objects: _Objects) -> str:
    tree = _tree(files, objects)
    body = f"tree {tree}\nauthor {AUTHOR}\ncommitter {AUTHOR}\n\nInitial commit\n"
    return _store(objects, "commit", body.encode())


def _tree(files: Mapping[str, str], objects: _Objects) -> str:
    folders: dict[str, dict[str, str]] = {}
    entries: list[tuple[str, str, str]] = []
    for path, text in files.items():
        head, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(head, {})[rest] = text
        else:
            entries.append((head, "100644", _store(objects, "blob", text.encode())))
    for name, inner in folders.items():
        entries.append((name, "40000", _tree(inner, objects)))
    entries.sort(key=lambda entry: entry[0] + ("/" if entry[1] == "40000" else ""))
    body = b"".join(
        f"{mode} {name}".encode() + b"\0" + bytes.fromhex(sha) for name, mode, sha in entries
    )
    return _store(objects, "tree", body)


def _index(files: Mapping[str, str]) -> bytes:
    """Return a version 2 index without file times (git compares contents where it must)."""
    body = b"DIRC" + struct.pack(">II", 2, len(files))
    for path in sorted(files, key=str.encode):
        data, name = files[path].encode(), path.encode()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).digest()
        stat = struct.pack(">10I", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, len(data))
        entry = stat + blob + struct.pack(">H", min(len(name), 0xFFF)) + name
        body += entry + b"\0" * (8 - len(entry) % 8)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()
