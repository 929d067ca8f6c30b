"""What the tests of the verifications share."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture(scope="module")
def modules(repo_root):
    """Return modules(name) -> a module of benchmarks/."""
    sys.path.insert(0, str(repo_root / "benchmarks"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(repo_root / "benchmarks"))


@pytest.fixture
def clone(modules, tmp_path):
    """Return clone(answers): a clone whose Python prints, by a word of its arguments, a text."""

    def make(answers=()):
        root = tmp_path / "main"
        (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        lines = ["#!/bin/sh", 'case "$*" in']
        for number, (word, status, text) in enumerate(answers):
            (root / f"answer-{number}").write_text(text)
            lines.append(f"*{word}*) cat answer-{number}; exit {status};;")
        python = root / ".venv" / "bin" / "python"
        python.write_text("\n".join([*lines, "esac", "exit 99"]))
        python.chmod(0o755)
        return modules("checks").Clone(root=root)

    return make
