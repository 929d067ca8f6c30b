"""Serve a model with the embedded JAX engine, by SGLang's HTTP contract.

python launchers/serve.py --model=HF_FOLDER --port=30000
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from skyrl_jax.serve.process import ServeOptions, main

_MODEL = flags.DEFINE_string("model", None, "HF folder (config.json + *.safetensors)")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "address to listen on")
_PORT = flags.DEFINE_integer("port", 30000, "port to listen on; 0 = any free one")
_PORT_FILE = flags.DEFINE_string("port_file", "", "file that receives the port once serving")
_SLOTS = flags.DEFINE_integer("slots", 64, "requests decoded at once")
_CONTEXT = flags.DEFINE_integer("max_context", 512, "tokens of prompt and answer together")
_ROWS = flags.DEFINE_integer("prefill_rows", 4, "prompt chunks per prefill dispatch")
_CHUNK = flags.DEFINE_integer("prefill_chunk", 32, "tokens per prompt chunk")
_STEPS = flags.DEFINE_integer("decode_steps", 8, "tokens per decode dispatch")
_VERSION = flags.DEFINE_string("weight_version", "default", "name of the first weights")
_WAIT = flags.DEFINE_boolean(
    "wait_for_weights", False, "start with no weights; serve after the first update"
)
_PARENT = flags.DEFINE_integer(
    "parent_pid", 0, "process that starts this server, which ends with it; 0 = the present parent"
)
_THREADS = flags.DEFINE_integer("threads", 0, "threads of XLA's CPU programs; 0 = all cores")


def _main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f"error: unexpected argument {argv[1]!r}; flags start with --", file=sys.stderr)
        return 2
    return main(
        ServeOptions(
            model=_MODEL.value,
            host=_HOST.value,
            port=_PORT.value,
            port_file=_PORT_FILE.value,
            slots=_SLOTS.value,
            max_context=_CONTEXT.value,
            prefill_rows=_ROWS.value,
            prefill_chunk=_CHUNK.value,
            decode_steps=_STEPS.value,
            weight_version=_VERSION.value,
            wait_for_weights=_WAIT.value,
            threads=_THREADS.value,
            parent_pid=_PARENT.value,
        )
    )


if __name__ == "__main__":
    flags.mark_flag_as_required("model")
    app.run(_main)
