"""The gateway's promises: exact tokens, forks, every client and agent, load, clear refusals."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import section_4b
from checks import Clone, Outcome, Part
from learner_parts import PATIENCE_S, Check, passed, proved, script, states
from learner_promises import HOUSE
from main_job import junit, setup, tests

RENDERER = (
    "tests/generation/test_renderer.py",
    "tests/generation/test_rendered.py",
    "tests/generation/test_template.py",
    "tests/generation/test_encode.py",
    "tests/generation/test_wheel.py",
    "tests/generation/test_real_histories.py",
)
READERS = ("tests/generation/test_formats.py",)
DOCTOR = ("tests/generation/test_matrix.py",)
HISTORIES = (
    "tests/gateway/test_conversation.py",
    "tests/gateway/test_conversation_property.py",
    "tests/batching/test_histories.py",
    "tests/batching/test_sequences.py",
    "tests/batching/test_ledger.py",
)
DOOR = (
    "tests/gateway/test_front.py",
    "tests/gateway/test_refused.py",
    "tests/gateway/test_session.py",
    "tests/gateway/test_sockets.py",
    "tests/gateway/test_memory.py",
    "tests/gateway/test_bodies.py",
    "tests/gateway/test_history.py",
    "tests/gateway/test_digests.py",
    "tests/gateway/test_cost.py",
    "tests/gateway/test_sglang.py",
    "tests/gateway/test_openai_chat.py",
    "tests/gateway/test_openai_responses.py",
    "tests/gateway/test_anthropic.py",
)
CLIENTS = ("tests/gateway/clients/test_openai.py", "tests/gateway/clients/test_anthropic.py")
AGENTS = (
    "tests/agents/test_external.py",
    "tests/agents/test_commands.py",
    "tests/agents/test_forwarder.py",
    "tests/agents/test_wiring.py",
)
REFUSED = (
    # malformed JSON, NaN temperature, 10 MB
    "tests/gateway/test_refused.py::test_bad_input_is_refused_and_the_server_goes_on",
    # unknown role, tool message without call, image parts
    "tests/gateway/test_refused.py::test_a_wrong_message_is_refused_and_the_server_goes_on",
    "tests/gateway/test_refused.py::test_a_wrong_key_is_refused_and_the_server_goes_on",
    "tests/gateway/test_refused.py::test_a_session_used_by_two_clients_at_once_mixes_nothing",
    "tests/gateway/test_refused.py::test_a_large_body_in_chunks_is_refused_too",
    "tests/gateway/test_refused.py::test_a_large_body_is_refused_before_it_is_sent",
    "tests/gateway/test_front.py::test_a_gateway_with_a_key_wants_one",
    "tests/gateway/clients/test_openai.py::test_errors",
    "tests/gateway/clients/test_anthropic.py::test_errors",
    "tests/gateway/clients/test_openai.py::test_two_clients_of_one_session_at_once",
)
# What lane-agents must hold: an episode by its own submit and a free one, of each.
EPISODES = tuple(
    f"tests.lanes.agents.test_scaffolds::test_{agent}_{what}"
    for agent in ("mini_swe_agent", "openhands", "a_loop_on_the_openai_client")
    for what in ("repairs_a_real_row", "runs_free")
)
ORACLE = tuple(
    f"tests.lanes.templates.test_qwen3::test_{what}"
    for what in ("what_follows_a_tool_turn", "whole_prompts", "parsed_answers")
)
# Each: part, promise, the tests that prove it.
PROVED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("renderer", "Qwen3, Llama 3.1, SmolLM2: incremental ids = one render; forks", RENDERER),
    ("readers", "hermes, Qwen XML, Llama JSON, OpenHands calls; malformed ones told", READERS),
    ("doctor", "every template of the trl wheel; faults.md 4b, column by column", DOCTOR),
    ("histories", "2,500 random histories: the ledger, exactly once; 11 by hand", HISTORIES),
    ("door", "dialects, sessions, budgets, retries, sockets, disconnects", DOOR),
    ("clients", "official openai and anthropic clients, stream and not", CLIENTS),
    ("agents", "unmodified programs in a sandbox through their own socket", AGENTS),
    ("bad-input", "right status, the dialect's own error, the run goes on", REFUSED),
    ("house", "import contracts, ruff, mypy run in make test", HOUSE),
)
COST_RATIO = 1.5
TEMPLATES = 72  # in the wheel of trl 1.16.0
LOAD_S, P50_MS, P99_MS, LEFT_MB = 180, 5.0, 50.0, 8.0
LANE_LIMIT_S = 25 * 60


def faults(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Check that the rows of sections B and C name tests, and that these ran and passed."""
    code = "import json; from tests.test_faults_c import ROWS; print(json.dumps(ROWS))"
    rows = script(clone, "-c", code, log="faults-c.log")[1]
    cases = junit(clone)[1]
    told: dict[str, Any] = {row: states(cases, nodes) for row, nodes in rows.items()}
    none_missing = states(cases, ("tests/test_faults_c.py::test_no_row_is_missing",))
    return Outcome(held=passed(none_missing) and all(map(passed, told.values())), figures=told)


def templates(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Run the doctor on each template of the trl wheel; compare with section 4b of faults.md."""
    text = (clone.root.parent / "shared" / "reference" / "faults.md").read_text()
    (wheel,) = (clone.root / ".cache" / "test-downloads").glob("trl-1.16.0-*.whl")
    folder = clone.root / ".cache" / "templates"
    folder.mkdir(exist_ok=True)
    found: dict[str, dict[str, str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(name for name in archive.namelist() if name.endswith(".jinja")):
            file = folder / Path(name).name
            file.write_bytes(archive.read(name))
            argv = ["launchers/doctor.py", "template", f"--template={file}", "--json"]
            ran, told = script(clone, *argv, log=f"doctor-{file.stem}.log")
            if ran.status == 0 and told["template"] == str(file):
                found[file.stem] = told["matrix"]
    said = section_4b.stated(text, found)
    gaps = section_4b.differences(found, said, section_4b.CORRECTED)
    told_of = {"templates": len(found), "families_of_4b": len(said), "cells": 7 * len(said)}
    more = {"differences": gaps, "corrected": section_4b.CORRECTED, "matrix": found}
    return Outcome(held=len(found) >= TEMPLATES and not gaps, figures=told_of | more)


def cost(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Time the turns of a long session in two dialects, from bytes to bytes."""
    told: dict[str, Any] = {}
    for dialect in ("chat", "messages"):
        argv = ["benchmarks/conversation.py", f"--dialect={dialect}"]
        told[dialect] = script(clone, *argv, log=f"cost-{dialect}.log")[1]
    held = all(
        one["turns"] == 128 and one["tokens"] >= 69_000 and 0 < one["ratio"] <= COST_RATIO
        for one in told.values()
    )
    return Outcome(held=held, figures=told | {"at_most": COST_RATIO})


def load(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Play 256 sessions at once for three minutes (benchmarks/gateway.py judges its figures)."""
    ran, found = script(clone, "benchmarks/gateway.py", log="load.log")
    held = (
        ran.status == 0
        and found["held"] is True
        and (found["sessions"], found["turns"]) == (256, 20)
        and found["rss_mb"]["after"] - found["rss_mb"]["warm"] <= LEFT_MB
        and found["lost"] == found["crossed"] == found["alive"] == 0
        and found["seconds"] >= LOAD_S
        and found["requests"] >= 256 * 20
        and found["prompt_tokens"] >= 0.95 * 16_000
        and 0 < found["overhead_ms"]["p50"] < P50_MS
        and 0 < found["overhead_ms"]["p99"] < P99_MS
    )
    return Outcome(held=held, figures=found)


def lane(name: str, *wanted: str) -> Check:
    """Return a check that a lane's tests all ran and passed, in time, packages included.

    Args:
        name: of the lane.
        wanted: cases that must be among them.
    """

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        report = clone.root / ".cache" / f"lane-{name}.xml"
        report.unlink(missing_ok=True)
        command = ["make", f"lane-{name}", f"TESTS=--junitxml=.cache/{report.name}"]
        ran = clone.run(command, log=f"lane-{name}.log", timeout_s=PATIENCE_S, check=False)
        counts, cases = junit(clone, report.name)
        held = (
            ran.status == 0
            and counts["tests"] > 0
            and counts["failed"] == counts["skipped"] == 0
            and set(wanted) <= set(cases)
            and ran.seconds <= LANE_LIMIT_S
        )
        told = {**counts, "seconds": round(ran.seconds, 1), "passed": sorted(cases)}
        return Outcome(held=held, figures=told)

    return run


PARTS: tuple[Part, ...] = (
    Part(name="setup", promise="a fresh clone sets itself up", run=setup),
    Part(name="tests", promise="make test in 15 min after downloads, 0 skipped", run=tests),
    *(Part(name=name, promise=told, run=proved(*nodes)) for name, told, nodes in PROVED),
    Part(
        name="faults",
        promise="faults.md: rows 1-17, 35-40 of C, the 11 histories, 10 rows of B",
        run=faults,
    ),
    Part(
        name="templates-4b",
        promise="doctor --json on all 72 templates of trl = faults.md 4b, corrections listed",
        run=templates,
    ),
    Part(name="cost", promise="turns 119-128 of 69k tokens <= 1.5 x turns 10-19", run=cost),
    Part(
        name="load",
        promise="256 sessions, 20 turns, 16k tokens, 3 min: p50 < 5, p99 < 50 ms, none lost",
        run=load,
    ),
    Part(
        name="lane-templates",
        promise="renderers 0.1.12 agrees on Qwen3",
        run=lane("templates", *ORACLE),
    ),
    Part(
        name="lane-agents",
        promise="mini-swe-agent, openhands-sdk, openai loop: graded 1 by their own submit; free",
        run=lane("agents", *EPISODES),
    ),
)
