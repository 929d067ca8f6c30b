"""verify.py: parts resume on the same code, refuse what would make a result untrue, fail whole."""

import json
import re
import shutil
import subprocess
import sys

import pytest

PARTS = """
import time
from checks import Outcome, Part

def count(clone, figures):
    ran = clone.run(["sh", "-c", "cat code.py; ls ../shared"], log="a.log", timeout_s=30)
    return Outcome(held="x = 1" in ran.output, figures={"output": ran.output})

def late(clone, figures):
    clone.run(["sh", "-c", "sleep 60 & echo started; wait"], log="b.log", timeout_s=1)

def after(clone, figures):
    named = {"lines": [f"error: {clone.root}/a/b.json", 1], "root": str(clone.root)}
    return Outcome(held=True, figures={"saw": sorted(figures), "named": named})

PARTS = (
    Part(name="count", promise="counts", run=count),
    Part(name="late", promise="ends in time", run=late),
    Part(name="after", promise="sees the figures before it", run=after),
)
"""


def _git(root, *arguments):
    user = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *user, *arguments], cwd=root, check=True, capture_output=True)


def _commit(root, path, content):
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text(content)
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", path)


def _verify(root, *flags):
    command = [sys.executable, "benchmarks/verify.py", "01-main-job", *flags]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def project(tmp_path, repo_root):
    """A small project of its own with the real framework and three parts."""
    root = tmp_path / "main"
    root.mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "data").touch()
    _git(root, "init", "-q")
    (root / "benchmarks").mkdir()
    for name in ("verify.py", "checks.py"):
        shutil.copy(repo_root / "benchmarks" / name, root / "benchmarks")
    (root / "benchmarks" / "main_job.py").write_text(PARTS)
    for name in ("learner_promises", "gateway_promises", "sandbox_promises"):
        (root / "benchmarks" / f"{name}.py").write_text("PARTS = ()\n")
    (root / ".gitignore").write_text(".cache/\n__pycache__/\n")
    _commit(root, "code.py", "x = 1\n")
    return root


def _report(root):
    return json.loads((root / "docs" / "verify" / "01-main-job.json").read_text())


def test_parts_run_once_per_code_and_a_failing_one_stops_none(project):
    status, _ = _verify(project)
    report = _report(project)
    assert status == 1 and not report["held"]
    held = {name: part["held"] for name, part in report["parts"].items()}
    assert held == {"count": True, "late": False, "after": True}
    assert report["parts"]["count"]["figures"]["output"] == "x = 1\ndata\n"
    assert "did not end in 1 s" in report["parts"]["late"]["figures"]["error"]
    assert report["parts"]["after"]["figures"] == {
        "saw": ["count", "late"],
        "named": {"lines": ["error: a/b.json", 1], "root": "."},
    }

    # Committing the results keeps them; committing code does not.
    _commit(project, "docs/notes.md", "measured")
    finished = {name: part["finished"] for name, part in report["parts"].items()}
    _verify(project)
    assert {n: p["finished"] for n, p in _report(project)["parts"].items()} == finished
    _commit(project, "code.py", "x = 2\n")
    _verify(project, "--only=count")
    parts = _report(project)["parts"]
    assert list(parts) == ["count"] and not parts["count"]["held"]


def test_refuses_without_shared_and_with_uncommitted_code(project):
    (project / "code.py").write_text("x = 3\n")
    status, told = _verify(project)
    assert status == 2 and "code.py" in told
    _git(project, "checkout", "code.py")
    shutil.rmtree(project.parent / "shared")
    status, told = _verify(project)
    assert status == 2 and "../shared" in told
    assert not (project / "docs").exists()


def test_unknown_part_is_named(project):
    status, told = _verify(project, "--only=cuont")
    assert status == 2 and "'cuont'" in told and "count" in told


def test_no_report_tells_where_its_clone_lay(repo_root):
    reports = sorted((repo_root / "docs" / "verify").glob("*.json"))
    assert reports
    for report in reports:
        assert not re.search(r"/[\w.-]+/\.cache/", report.read_text()), report.name
