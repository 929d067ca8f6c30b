"""The example of docs/gateway.md is what a reader gets: it is run as it stands there."""

import dataclasses
import os
import subprocess
import sys
import textwrap

from skyrl_jax.models import hf
from tests.actor.fakes import make_tokenizer
from tests.engine import tiny
from tests.serve import running


def example(repo_root) -> str:
    """Return the first code block of the page that is a program."""
    page = (repo_root / "docs" / "gateway.md").read_text()
    begin = page.index("    import asyncio, sys")
    lines = page[begin:].splitlines()
    end = next(n for n, line in enumerate(lines) if line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[:end]))


def test_the_example_runs_against_a_server(repo_root, tmp_path):
    tokenizer = make_tokenizer()
    cfg = dataclasses.replace(tiny.CFG, vocab_size=tokenizer.vocab_size)
    model = hf.save_hf(tmp_path / "model", cfg, tiny.params(cfg=cfg))
    tokenizer.save(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "example.py").write_text(example(repo_root))
    flags = ("--weight_version=0",)
    with running.running(model, tmp_path, *flags) as (url, _):
        told = subprocess.run(
            [sys.executable, "example.py", model, url],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repo_root)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert told.returncode == 0, told.stderr
    heard, read = told.stdout.splitlines()
    assert heard.startswith("the agent reads: ")
    assert " prompt tokens, then (" in read
