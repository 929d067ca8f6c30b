"""Trees of real rows from PyPI releases: downloaded once, unpacked, committed, laid over the image.

A release is near the row's base commit, not equal to it, so such rows are approximate.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import DataError, ImageError
from skyrl_jax.tasks.swe.harness import Harness
from skyrl_jax.tasks.swe.history import scrub_history
from skyrl_jax.tasks.swe.layers import build_once
from skyrl_jax.tasks.swe.repo import WORKDIR

TREES = Path(__file__).with_name("pypi_trees.toml")
_DOWNLOAD_TIMEOUT_S = 600
_DATE = "1700000000 +0000"
_GIT_ENV = {
    "GIT_AUTHOR_NAME": "skyrl-tasks",
    "GIT_AUTHOR_EMAIL": "tasks@localhost",
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": "skyrl-tasks",
    "GIT_COMMITTER_EMAIL": "tasks@localhost",
    "GIT_COMMITTER_DATE": _DATE,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRecipe:
    """How the tree of a row is made; see the head of pypi_trees.toml.

    ``excluded`` maps a PASS_TO_PASS test to the reason why it is left out.
    """

    release: str
    beside: tuple[str, ...]
    requires: tuple[str, ...]
    python: str
    sdist: bool
    harness: Harness
    excluded: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree that is ready: layers for the sandbox (first on top) and its only commit.

    ``image``: the row's own container image, which holds the tree itself; such a tree is exact.
    ``path``: a folder of that image with the task's Python, for PATH.
    """

    recipe: TreeRecipe
    layers: tuple[str, ...]
    commit: str
    image: str = ""
    path: str = ""


def load_recipes(path: Path = TREES) -> dict[str, TreeRecipe]:
    """Read the recipes.

    Raises:
        DataError: the file is wrong; the message names the instance and the key.
    """
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path.name}: {error}") from error
    return {name: _recipe(name, value, path.name) for name, value in values.items()}


def downloads_folder() -> Path:
    """Return where downloads are kept: SKYRL_TEST_DOWNLOADS, or .cache/test-downloads."""
    return Path(os.environ.get("SKYRL_TEST_DOWNLOADS") or ".cache/test-downloads")


def download(requirement: str, folder: Path, *options: str) -> Path:
    """Return the file of a pinned release, downloading it when it is not there yet.

    Raises:
        ImageError: it cannot be downloaded; pip's last line says why.
    """
    found = _find(requirement, folder, "--no-binary=:all:" in options)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options]
    try:
        done = subprocess.run(
            [*command, "-d", str(folder), requirement],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ImageError(f"pip download {requirement} took over {error.timeout:.0f} s") from error
    found = _find(requirement, folder, "--no-binary=:all:" in options)
    if done.returncode or found is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ImageError(f"pip download {requirement} failed: {last}")
    return found


def build_tree(
    recipe: TreeRecipe,
    cache: Path,
    downloads: Path,
    prepare: Callable[[Path], None] | None = None,
) -> Tree:
    """Make the layers of a recipe (once) and return them.

    Args:
        recipe: what to build.
        cache: where layers are kept.
        downloads: where releases are kept.
        prepare: gives a layer to the agent's uid.
    """
    files = [_fetch(name, downloads, recipe.sdist) for name in (recipe.release, *recipe.beside)]
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    layer = cache / f"tree-{recipe.release.replace('==', '-')}-{key}"

    def build(draft: Path) -> None:
        root = draft / WORKDIR
        for file in files:
            unpack(file, root)
        _commit(root)
        _compile(root, draft)
        if prepare is not None:
            prepare(draft)

    layer = layer if layer.is_dir() else build_once(layer, build)
    layers = [str(layer)]
    if recipe.requires:
        layers.append(str(_environment(recipe.requires, cache, downloads)))
    head = (layer / WORKDIR / ".git" / "refs" / "heads" / "main").read_text().strip()
    return Tree(recipe=recipe, layers=tuple(layers), commit=head)


def unpack(file: Path, target: Path) -> None:
    """Unpack a wheel, or an sdist without its top folder and build records."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if ".dist-info/" not in name]
            archive.extractall(target, names)
        return
    with tarfile.open(file) as archive:
        members = []
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name and ".egg-info" not in member.name and member.name != "PKG-INFO":
                members.append(member)
        archive.extractall(target, members, filter="data")


def _environment(requires: Sequence[str], cache: Path, downloads: Path) -> Path:
    key = hashlib.sha256("\n".join(requires).encode()).hexdigest()[:12]
    layer = cache / f"env-{key}"

    def build(draft: Path) -> None:
        root = draft / "opt" / "env"
        for name in requires:  # with their records: pytest looks its version up
            with zipfile.ZipFile(_fetch(name, downloads, False)) as archive:
                archive.extractall(root)
        _compile(root, draft)
        for folder, _, names in os.walk(draft):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o644)

    return layer if layer.is_dir() else build_once(layer, build)


def _compile(root: Path, draft: Path) -> None:
    """Write bytecode beside the sources (ignored by git), naming no path of this machine."""
    skip = re.compile(r"/(tests|examples|docs|benchmarks)/")
    compileall.compile_dir(root, quiet=2, rx=skip, stripdir=str(draft), prependdir="/")


def _fetch(requirement: str, downloads: Path, sdist: bool) -> Path:
    return download(requirement, downloads, "--no-binary=:all:" if sdist else "--only-binary=:all:")


def _find(requirement: str, folder: Path, sdist: bool) -> Path | None:
    name, _, version = requirement.partition("==")
    stem = re.sub(r"[-_.]+", "[-_.]", re.escape(name).replace("\\", ""))
    ending = r"\.(tar\.gz|zip)" if sdist else r"-.*\.whl"
    pattern = re.compile(f"{stem}-{re.escape(version)}{ending}", re.IGNORECASE)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((file for file in files if pattern.fullmatch(file.name)), None)


def _commit(root: Path) -> None:
    for command in (
        ("init", "-q", "-b", "main"),
        ("add", "-A", "--force"),
        ("commit", "-q", "--no-gpg-sign", "-m", "Release"),
    ):
        try:
            subprocess.run(
                ["git", *command],
                cwd=root,
                env={**os.environ, **_GIT_ENV},
                capture_output=True,
                text=True,
                timeout=300,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            text = getattr(error, "stderr", "") or str(error)
            raise ImageError(f"git {command[0]} failed for a task tree: {text.strip()}") from error
    scrub_history(root, (root / ".git" / "refs" / "heads" / "main").read_text().strip())
    (root / ".git" / "info" / "exclude").write_text("__pycache__/\n")


def _recipe(name: str, value: Any, where: str) -> TreeRecipe:
    try:
        source = str(value["source"])
        folder = f"/{WORKDIR}/{source}".rstrip("/")
        excluded = {str(item["test"]): str(item["why"]) for item in value["excluded"]}
        return TreeRecipe(
            release=str(value["release"]),
            beside=tuple(value.get("beside", ())),
            requires=tuple(value["requires"]),
            python=str(value["python"]),
            sdist=bool(value.get("sdist", False)),
            harness=Harness(kind=str(value["harness"]), python_path=(folder, "/opt/env")),
            excluded=excluded,
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{where}: {name}: missing or wrong key {error}") from error
