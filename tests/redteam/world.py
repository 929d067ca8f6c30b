"""Where the tricks are played: one small real row with hidden tests, real backends, real code."""

from __future__ import annotations

import compileall
import contextlib
import socket
import tempfile
import warnings
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyrl_jax.core.config import AgentConfig, SandboxConfig
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.core.types import Score, Task
from skyrl_jax.sandbox.bwrap import BwrapProvider, prepare_layer
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.process import ProcessProvider
from skyrl_jax.tasks.swe.harness import Harness
from skyrl_jax.tasks.swe.history import scrub_history
from skyrl_jax.tasks.swe.layers import build_once
from skyrl_jax.tasks.swe.repo import make_layer
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.suite import SweSuite
from skyrl_jax.tasks.swe.synthesize import make_splits
from skyrl_jax.tasks.swe.trees import Tree, TreeRecipe, download
from tests.redteam import future

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".cache"
PYTEST = ("pytest==7.4.4", "pluggy==1.5.0", "iniconfig==2.0.0", "packaging==24.2")
SANDBOX = SandboxConfig(
    backend="bwrap",
    image="",
    cpus=1.0,
    memory_mb=256,
    pids=64,
    disk_mb=64,
    command_timeout_s=20.0,
    lifetime_s=300.0,
    best_effort=True,
    warm=0,
    warm_creates=1,
    docker_runtime="",
    docker_read_only=False,
    docker_connections=16,
    docker_timeout_s=60.0,
)

BUGGY = "def rectangle(width, height):\n    return width + height\n"
FIXED = BUGGY.replace("width + height", "width * height")
HELPERS = "def check(got, want):\n    assert got == want\n"
SHOWN = (
    "from shapes.area import rectangle\nfrom tests.helpers import check\n\n\n"
    "def test_square():\n    check(rectangle(2, 2), 4)\n"
)
FILES: Mapping[str, str] = {
    "shapes/__init__.py": "",
    "shapes/area.py": BUGGY,
    "tests/__init__.py": "",
    "tests/helpers.py": HELPERS,
    "tests/test_area.py": SHOWN,
}
TEST_PATCH = """diff --git a/tests/test_area.py b/tests/test_area.py
--- a/tests/test_area.py
+++ b/tests/test_area.py
@@ -2,5 +2,9 @@
 from tests.helpers import check
 
 
+def test_wide():
+    check(rectangle(3, 5), 15)
+
+
 def test_square():
     check(rectangle(2, 2), 4)
diff --git a/tests/test_more.py b/tests/test_more.py
new file mode 100644
--- /dev/null
+++ b/tests/test_more.py
@@ -0,0 +1,6 @@
+from shapes.area import rectangle
+from tests.helpers import check
+
+
+def test_tall():
+    check(rectangle(7, 2), 14)
"""
# The same test patch with asserts in place of the helper.
PLAIN_PATCH = (
    TEST_PATCH.replace("check(rectangle(3, 5), 15)", "assert rectangle(3, 5) == 15")
    .replace("check(rectangle(7, 2), 14)", "assert rectangle(7, 2) == 14")
    .replace("+from tests.helpers import check\n", "")
    .replace("+1,6", "+1,5")
)
REPAIR = """diff --git a/shapes/area.py b/shapes/area.py
--- a/shapes/area.py
+++ b/shapes/area.py
@@ -1,2 +1,2 @@
 def rectangle(width, height):
-    return width + height
+    return width * height
"""
NEEDED = ("tests/test_area.py::test_wide", "tests/test_more.py::test_tall")
KEPT = ("tests/test_area.py::test_square",)
# The same row for unittest: one test file, ids as `unittest -v` prints them.
UNIT_SHOWN = (
    "import unittest\n\nfrom shapes.area import rectangle\n\n\nclass Area(unittest.TestCase):\n"
    "    def test_square(self):\n        self.assertEqual(rectangle(2, 2), 4)\n"
)
UNIT_PATCH = """diff --git a/tests/test_area.py b/tests/test_area.py
--- a/tests/test_area.py
+++ b/tests/test_area.py
@@ -6,3 +6,6 @@
 class Area(unittest.TestCase):
     def test_square(self):
         self.assertEqual(rectangle(2, 2), 4)
+
+    def test_wide(self):
+        self.assertEqual(rectangle(3, 5), 15)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A suite of one task."""

    suite: SweSuite
    task: Task
    harness: Harness | None


@dataclass(slots=True, kw_only=True)
class Arena:
    """One backend with its worlds, and what the tricks may know of the host."""

    backend: str
    image: str
    provider: Any
    host: str
    scratch: Path
    facts: Mapping[str, str]
    worlds: dict[str, World] = field(default_factory=dict)
    twin: list[tuple[bool, str]] = field(default_factory=list)  # the harmless policy's outcome
    honest: dict[str, Score] = field(default_factory=dict)  # of each world's own repair

    def world(self, name: str) -> World:
        """Return a world, made once."""
        if name not in self.worlds:
            self.worlds[name] = _world(name, self.image, self.scratch)
        return self.worlds[name]

    def spec(self, **changes: Any) -> SandboxSpec:
        """Return the spec of the pytest world's sandbox, changed."""
        world = self.world("pytest")
        return replace(world.suite.spec(world.task.payload["row"]), **changes)

    @contextlib.asynccontextmanager
    async def box(self, spec: SandboxSpec, backend: str = "") -> AsyncIterator[Any]:
        """Make a sandbox; ``backend``: "", "process" or "host_network" (the controls')."""
        if not backend:
            box = await self.provider.create(spec)
            try:
                yield box
            finally:
                await box.destroy()
            return
        async with _unguarded(backend, self)() as provider:
            yield await provider.create(spec)


class HostNetworkBwrap(BwrapProvider):
    """The control of network isolation: sandboxes that share the host's."""

    def _bwrap_command(self, spec: SandboxSpec) -> list[str]:
        return [word for word in super()._bwrap_command(spec) if word != "--unshare-net"]


class HostNetworkDocker(DockerProvider):
    """The control of network isolation: containers that share the host's."""

    async def create(self, spec: SandboxSpec) -> Any:
        """Make one that has a network: the host's."""
        return await super().create(replace(spec, network=True))

    def _host_config(self, spec: SandboxSpec) -> Any:
        config = super()._host_config(spec)
        config["NetworkMode"] = "host"
        return config


def _unguarded(backend: str, arena: Arena) -> Callable[[], Any]:
    if backend == "process":
        return _process
    if arena.backend == "bwrap":
        return lambda: HostNetworkBwrap(run_id="redteam-off", cache_dir=CACHE)
    return lambda: HostNetworkDocker(run_id="redteam-off", cache_dir=CACHE, host=arena.host)


def _process() -> ProcessProvider:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ProcessProvider(run_id="redteam-off", cache_dir=CACHE)


@contextlib.asynccontextmanager
async def arena(backend: str, image: str, host: str = "") -> AsyncIterator[Arena]:
    """Open a backend: "bwrap" (``image``: a folder) or "docker" (a tag, and the daemon)."""
    if backend == "bwrap":
        provider: Any = BwrapProvider(run_id="redteam", cache_dir=CACHE)
    else:
        provider = DockerProvider(run_id="redteam", cache_dir=CACHE, host=host)
    with tempfile.TemporaryDirectory(prefix="skyrl-redteam-") as folder, _services() as facts:
        scratch = Path(folder)
        scratch.chmod(0o755)
        secret = scratch / "host-secret.txt"
        secret.write_text("s3cret-of-the-host\n")
        known = {**facts, "secret": str(secret), "mark": f"redteam-{scratch.name}"}
        async with provider:
            yield Arena(
                backend=backend,
                image=image,
                provider=provider,
                host=host,
                scratch=scratch,
                facts=known,
            )


@contextlib.contextmanager
def _services() -> Any:
    """Listen as the engine and the gateway do: on a loopback port, and on an abstract socket."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        name = f"redteam-{tcp.getsockname()[1]}"
        unix.bind("\0" + name)
        unix.listen(8)
        yield {"port": str(tcp.getsockname()[1]), "abstract": name}


def _world(name: str, image: str, scratch: Path) -> World:
    if name == "sealed":
        (row,) = make_splits(1, 0, 0, 5)["train"]
        suite = _suite(row, image, scratch, None)
        return World(suite=suite, task=suite.tasks("all")[0], harness=None)
    kind = "unittest" if name == "unittest" else "pytest"
    path = ("/testbed", "/opt/env") if kind == "pytest" else ("/testbed",)
    harness = Harness(kind=kind, python_path=path)
    layers, commit = _tree(name, scratch)
    recipe = TreeRecipe(
        release="shapes==1",
        beside=(),
        requires=(),
        python="3.11",
        sdist=False,
        harness=harness,
        excluded={},
    )
    tree = Tree(recipe=recipe, layers=layers, commit=commit)
    suite = _suite(_row(name, commit), image, scratch, tree)
    return World(suite=suite, task=suite.tasks("all")[0], harness=harness)


def _row(name: str, commit: str) -> SweRow:
    unit = name == "unittest"
    patches = {"unittest": UNIT_PATCH, "plain": PLAIN_PATCH}
    return SweRow(
        instance_id=f"shapes__shapes-{name}",
        repo="shapes/shapes",
        base_commit=commit,
        problem_statement="rectangle() does not return the area.",
        patch=REPAIR,
        test_patch=patches.get(name, TEST_PATCH),
        fail_to_pass=("test_wide (tests.test_area.Area)",) if unit else NEEDED,
        pass_to_pass=("test_square (tests.test_area.Area)",) if unit else KEPT,
    )


def _tree(name: str, scratch: Path) -> tuple[tuple[str, ...], str]:
    """Return a world's layers and base commit; what the control's worlds leak is in them."""
    files = {**FILES, "tests/test_area.py": UNIT_SHOWN} if name == "unittest" else dict(FILES)
    cache = scratch / "trees"
    if name.startswith("future"):
        layer, commit = future.tree(cache / name, files, FIXED, prepare_layer, scrub_history, name)
    else:
        layer = make_layer(cache, files, prepare_layer)
        commit = (layer / "testbed/.git/refs/heads/main").read_text().strip()
    layers = [str(layer)]
    if name == "leaky":
        leak = scratch / "leak" / "opt" / "hidden"
        leak.mkdir(parents=True)
        (leak / "tests.diff").write_text(TEST_PATCH)
        layers.append(str(scratch / "leak"))
    if name != "unittest":
        layers.append(str(_pytest_layer()))
    return tuple(layers), commit


def _pytest_layer() -> Path:
    """Return the layer with pytest in /opt/env, made once from its wheels."""

    def build(draft: Path) -> None:
        root = draft / "opt" / "env"
        for requirement in PYTEST:
            wheel = download(requirement, CACHE / "test-downloads", "--only-binary=:all:")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(root)
        compileall.compile_dir(root, quiet=2, stripdir=str(draft), prependdir="/")
        for folder in (draft, *draft.rglob("*")):
            folder.chmod(0o755 if folder.is_dir() else 0o644)

    layer = CACHE / "swe" / "redteam-pytest-7.4.4"
    return layer if layer.is_dir() else build_once(layer, build)


def _suite(row: SweRow, image: str, scratch: Path, tree: Tree | None) -> SweSuite:
    return SweSuite(
        {"all": [row]},
        agent=AgentConfig(kind="codeact", prompt_style="full", observation_tokens=200),
        sandbox=SANDBOX,
        image=image,
        cache=scratch / "swe",
        prepare=prepare_layer,
        trees={row.instance_id: tree} if tree else None,
    )
