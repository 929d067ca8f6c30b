"""The sandboxes' verification: its judgements by hand."""

from __future__ import annotations

import ast
import json

import pytest

KINDS = ("exception", "cancellation", "kill -9", "daemon restart", "killed container")
CLEAN = {
    "bwrap": 700, "docker": 300, "over_deadline": 0, "problems": [],
    "injected": dict.fromkeys(KINDS, 20), "left": {"sandboxes": 0, "mounts": 0},
}  # fmt: skip
WIDE = {
    "held": True, "live_peak": 1000, "episodes": 4000, "ended_once": 4000, "host_killed": 250,
    "hosts_down": 1, "wrong": 0, "left": 0, "lag_p99_ms": 40.0, "threads": 20, "rss_mb": 300.0,
}  # fmt: skip
FAST = {
    "roundtrip_p50_ms": 0.3, "exec_p50_ms": 2.0, "acquire_to_first_result_p50_ms": 20.0,
    "ratio": 1.5, "peers": {name: {} for name in "abcd"},
}  # fmt: skip


@pytest.fixture
def promises(modules):
    return modules("sandbox_promises")


@pytest.mark.parametrize(
    ("status", "changes", "held"),
    [
        (0, {}, True),
        (1, {}, False),
        (0, {"bwrap": 699}, False),
        (0, {"docker": 299}, False),
        (0, {"injected": CLEAN["injected"] | {"kill -9": 19}}, False),
        (0, {"left": {"sandboxes": 0, "mounts": 1}}, False),
        (0, {"over_deadline": 1}, False),
        (0, {"problems": ["Traceback"]}, False),
    ],
)
def test_leaks(promises, clone, status, changes, held):
    made = clone([("sandbox_leaks.py", status, json.dumps(CLEAN | changes))])
    assert promises.leaks(made, {}).held is held


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"held": False}, False),
        ({"live_peak": 999}, False),
        ({"ended_once": 3999}, False),
        ({"episodes": 400, "ended_once": 400}, False),
        ({"host_killed": 0}, False),
        ({"hosts_down": 0}, False),
        ({"wrong": 1}, False),
        ({"left": 1}, False),
        ({"lag_p99_ms": 100.0}, False),
        ({"threads": 100}, False),
        ({"rss_mb": 2000.0}, False),
    ],
)
def test_scale(promises, clone, changes, held):
    made = clone([("sandbox_scale.py", 0, json.dumps(WIDE | changes))])
    assert promises.scale(made, {}).held is held


@pytest.mark.parametrize(
    ("backend", "changes", "held"),
    [
        ("bwrap", {}, True),
        ("bwrap", {"roundtrip_p50_ms": 2.0}, False),
        ("bwrap", {"exec_p50_ms": 6.0}, False),
        ("docker", {}, True),
        ("docker", {"acquire_to_first_result_p50_ms": 60.0}, False),
        ("docker", {"ratio": 1.29}, False),
        ("docker", {"peers": {"docker_sdk": {}}}, False),
    ],
)
def test_speed(promises, clone, backend, changes, held):
    part = next(part for part in promises.PARTS if part.name == f"speed-{backend}")
    made = clone([("sandbox.py", 0, json.dumps(FAST | changes))])
    assert part.run(made, {}).held is held


def rows(tricks, suicides, **bad):
    found = [
        {"trick": f"{kind}{n}", "kind": kind, "backend": backend, "defended": True, "control": True}
        for kind, count in (("trick", tricks), ("suicide", suicides))
        for backend in ("bwrap", "docker")
        for n in range(count)
    ]
    return [*found[:-1], found[-1] | bad]


@pytest.mark.parametrize(
    ("played", "held"),
    [
        (rows(25, 10), True),
        (rows(24, 10), False),
        (rows(25, 9), False),
        (rows(30, 12, defended=False), False),
        (rows(30, 12, control=False), False),
        (rows(30, 12, control=None), False),
        ([row for row in rows(25, 10) if row["backend"] == "bwrap"], False),
        ([], False),
    ],
)
def test_the_red_teams_rows(promises, played, held):
    assert promises.all_hold(promises.tally(played)) is held


def test_the_tests_that_are_named_are_there(promises, repo_root):
    for _, _, nodes in promises.PROVED:
        for node in nodes:
            path, _, name = node.partition("::")
            tree = ast.parse((repo_root / path).read_text())
            assert not name or any(getattr(item, "name", "") == name for item in tree.body)
