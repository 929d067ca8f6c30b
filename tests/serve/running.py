"""Servers for tests: the launcher as a real process, and SGLang's own schema as the judge."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import requests

from skyrl_jax.models import hf
from tests.engine import tiny

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--slots=8", "--max_context=128", "--prefill_chunk=16", "--decode_steps=4")


def save_model(folder, seed=0, scale=1.0):
    params = tiny.params(seed)
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * scale
    return hf.save_hf(folder, tiny.CFG, params, extra_config={"eos_token_id": 1})


def launch(model, *flags, port_file):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "launchers" / "serve.py"),
            f"--model={model}",
            f"--port_file={port_file}",
            *FLAGS,
            *flags,
        ],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def running(model, folder, *flags):
    """Yield (base url, process) of a healthy server."""
    port_file = Path(folder) / "port"
    port_file.unlink(missing_ok=True)
    process = launch(model, "--port=0", *flags, port_file=port_file)
    try:
        until = time.monotonic() + 200
        while not port_file.exists():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}", process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def post(url, body=None, **kwargs):
    return requests.post(url, json=body, timeout=60, **kwargs)


def oracle(downloads):
    """SGLang 0.5.23's generated request and response schema, loaded without importing sglang."""
    wheel = next(Path(downloads).glob("sglang-0.5.23-*.whl"))
    target = Path(downloads) / "sglang_api_types_0_5_23.py"
    if not target.exists():
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            partial.write_bytes(archive.read("sglang/api/v1/api_types.py"))
        partial.replace(target)
    spec = importlib.util.spec_from_file_location("sglang_api_types", target)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sglang_api_types"] = module
    spec.loader.exec_module(module)
    return module
