"""A real row in its own container image: pulled under its SWE-bench name, made ready, graded."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker as docker_sdk
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.bwrap import prepare_layer
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.fake import FakeProvider
from skyrl_jax.tasks.swe.image_names import row_image
from skyrl_jax.tasks.swe.rows_suite import select_rows
from skyrl_jax.tasks.swe.trees import build_tree, downloads_folder, load_recipes
from skyrl_jax.train.row_images import ready_images
from tests.sandbox.conftest import CACHE, daemon, docker_image, image  # noqa: F401
from tests.sandbox.registry import running_registry
from tests.tasks.test_real_rows import ROOT, SYMPY, sympy_file  # noqa: F401

pytestmark = pytest.mark.xdist_group("real-rows")


def push_row(host: str, base: str, registry: str, name: str, layers: tuple[str, ...]) -> None:
    """Push the base with a tree in /testbed under the row's name; nothing of it stays here."""
    client = docker_sdk.APIClient(base_url=host, timeout=120)

    async def build() -> str:
        async with DockerProvider(run_id="push", cache_dir=CACHE, host=host) as provider:
            spec = SandboxSpec(image=base, layers=layers, workdir="/testbed", best_effort=True)
            return await provider.layered(spec)

    made = asyncio.run(build())
    repository = f"{registry}/{name.rpartition(':')[0]}"
    client.tag(made, repository, "latest")
    for line in client.push(repository, tag="latest", stream=True, decode=True):
        assert "error" not in line, line
    client.remove_image(f"{repository}:latest")
    client.remove_image(made)
    client.close()


def run(child_env: dict[str, str], host: str, program: str, *flags: str) -> tuple[int, Any, str]:
    command = [sys.executable, f"launchers/{program}.py", "--config=configs/swe.py:quickstart"]
    command += ["--config.sandbox.backend=docker", f"--config.sandbox.image={flags[0]}", *flags[1:]]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**child_env, "DOCKER_HOST": host},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_an_image_under_its_swebench_name_is_pulled_and_graded(
    child_env: dict[str, str],
    daemon: str,  # noqa: F811
    docker_image: str,  # noqa: F811
    sympy_file: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (row,) = select_rows(sympy_file, [SYMPY])
    tree = build_tree(
        load_recipes()[SYMPY], CACHE / "swe" / "trees", downloads_folder(), prepare_layer
    )
    here = {**row.to_json(), "base_commit": tree.commit}  # the commit that this image has
    rows = tmp_path / "rows.json"
    nowhere = {**here, "instance_id": "sympy__sympy-1"}
    rows.write_text(json.dumps([here, nowhere]))
    name = row_image(row)
    with running_registry(tmp_path) as registry:
        push_row(daemon, docker_image, registry, name, tree.layers)
        mirror = f"--config.sandbox.image_mirror={registry}"
        flags = (docker_image, f"--tasks={rows}", mirror, f"--cache_dir={CACHE}")
        code, gold, said = run(child_env, daemon, "evaluate", *flags, "--images", f"--ids={SYMPY}")
        assert (code, gold["resolved"], gold["infra_failures"]) == (0, 1, 0), said
        (told,) = gold["rows"]
        assert told["image"].startswith("skyrl-prepared:") and "approximate" not in told
        assert f"image {name} from {registry}: pulling" in said
        code, both, _ = run(child_env, daemon, "evaluate", *flags, "--images", "--agent=noop")
        found = {row["instance_id"]: row for row in both["rows"]}
        assert code == 1 and (found[SYMPY]["score"], found[SYMPY]["verdict"]) == (0.0, "empty")
        missing = found["sympy__sympy-1"]
        assert (missing["score"], missing["verdict"]) == (None, "infra:image")
        assert "sympy_1776_sympy-1:latest is not there" in missing["why"]
        code, ready, said = run(child_env, daemon, "prepare", *flags)
        assert code == 1 and (ready["ready"], ready["failed"]) == (1, 1)
        assert ready["images"][SYMPY]["image"] == told["image"] and "[2/2]" in said
    client = docker_sdk.APIClient(base_url=daemon, timeout=60)
    for image_name in (told["image"], name):
        client.remove_image(image_name, force=True)
    client.close()


def test_other_backends_have_no_images(sympy_file: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"sandbox\.backend = 'docker'"):
        asyncio.run(ready_images(select_rows(sympy_file, [SYMPY]), FakeProvider()))
