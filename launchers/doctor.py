"""Look at a part of a job before the job is run, or at what one left behind.

python launchers/doctor.py template --tokenizer=DIR | --template=FILE [--variables=JSON] [--json]
python launchers/doctor.py sandboxes [--remove] [--json]

"template": which parts of a model's chat template are append-only, and what training does about
those that are not (docs/renderer.md). DIR is a Hugging Face folder; FILE is a jinja2 template, read
with DIR's special tokens where both are given. --json prints one object
{"template": ..., "matrix": {"tool": "ok" | "P@4" | "H@2" | "DIFF" | "same" | "raises", ...}}.
Exit code: 0 whatever the verdicts, 2 something is wrong.

"sandboxes": this user's open sandboxes on this machine, by run, and what dead runs left: cgroups,
containers (of the daemons they used and of DOCKER_HOST), folders and processes. --remove ends and
removes the leftovers; sandboxes of living owners and of other users are never touched. --json
prints {"live": [{"run", "backend", "open", "since"}], "left": [{"backend", "run", "what",
"problem"}]}. Exit code: 0 nothing is left (any more), 1 something is, 2 something is wrong.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from launchers.common import run_main
from skyrl_jax.core.errors import ConfigError, SkyrlError
from skyrl_jax.generation.renderer import open_renderer
from skyrl_jax.generation.renderer.folder import read_template
from skyrl_jax.generation.renderer.matrix import check_template, describe, difference
from skyrl_jax.sandbox.reaper import reap
from skyrl_jax.sandbox.registry import runs

_TOKENIZER = flags.DEFINE_string("tokenizer", "", "Hugging Face folder with tokenizer.json")
_TEMPLATE = flags.DEFINE_string("template", "", "file with a jinja2 chat template")
_VARIABLES = flags.DEFINE_string(
    "variables", "{}", 'what the template reads besides, e.g. {"enable_thinking": false}'
)
_REMOVE = flags.DEFINE_boolean("remove", False, "remove what dead runs left of their sandboxes")
_JSON = flags.DEFINE_boolean("json", False, "print one JSON object and nothing else")


def template(argv: list[str]) -> int:
    """Check a chat template and print the matrix."""
    del argv
    if not _TOKENIZER.value and not _TEMPLATE.value:
        raise ConfigError("name a model: --tokenizer=DIR or --template=FILE")
    folder = Path(_TOKENIZER.value) if _TOKENIZER.value else None
    variables = _variables(_VARIABLES.value)
    made = read_template(folder, _TEMPLATE.value or None)
    verdicts = check_template(
        lambda messages, generate: made.render_dicts(messages, generate=generate, **variables)
    )
    name = _TEMPLATE.value or _TOKENIZER.value
    if _JSON.value:
        matrix = {column: verdict.value for column, verdict in verdicts.items()}
        print(json.dumps({"template": name, "matrix": matrix}), flush=True)
        return 0
    print(f"chat template {name}")
    for column, verdict in verdicts.items():
        print(f"  {column:<16}{verdict.value:<8}{describe(column, verdict.value)}")
        if verdict.value == "raises":
            print(f"{'':<26}{verdict.one}")
        elif verdict.value not in ("ok", "same"):
            for piece in difference(verdict.one, verdict.other):
                print(f"{'':<26}... {piece} ...")
    told = "" if folder is None else _tell_renderer(folder, variables)
    print(told or "whether it can be trained on depends on its tokens too: name --tokenizer=DIR")
    return 0


def _tell_renderer(folder: Path, variables: dict[str, Any]) -> str:
    """Say what training would make of the folder: the ends of a turn, the formats, or why not."""
    try:
        renderer = open_renderer(folder, template=_TEMPLATE.value or None, variables=variables)
    except SkyrlError as error:
        return f"cannot be trained on: {error}"
    ends = ", ".join(
        f"{renderer.tokenizer.decode([number])} ({number})" for number in renderer.stop_token_ids
    )
    tools = renderer.tool_problem and f"\nagents with tools are refused: {renderer.tool_problem}"
    return f"a turn ends at {ends}; calls are read as {renderer.call_format}{tools}"


def _variables(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--variables={text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--variables={text!r} must be a JSON object")
    return value


def sandboxes(argv: list[str]) -> int:
    """List the living runs' sandboxes and the dead runs' leftovers; remove these when asked."""
    del argv
    live = [run for run in runs() if run.alive]
    left = reap(remove=_REMOVE.value, strays=True)
    bad = [item for item in left if item.problem or not _REMOVE.value]
    if _JSON.value:
        alive = [
            {"run": run.run, "backend": run.backend, "open": len(run.open), "since": run.since}
            for run in live
        ]
        print(json.dumps({"live": alive, "left": [asdict(item) for item in left]}), flush=True)
        return 1 if bad else 0
    for run in live:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.since))
        print(f"live  {run.backend:<8}{run.run}: {len(run.open)} open, since {since}")
    for item in left:
        done = item.problem or ("removed" if _REMOVE.value else "")
        print(f"left  {item.backend:<8}{item.run}: {item.what}" + (f" ({done})" if done else ""))
    if not left:
        print("no dead run left anything")
    elif bad and not _REMOVE.value:
        print("remove what is left by: python launchers/doctor.py sandboxes --remove")
    return 1 if bad else 0


COMMANDS = {"template": template, "sandboxes": sandboxes}


def _main(command: str, argv: list[str]) -> int:
    if command not in COMMANDS:
        raise ConfigError(f"name what to look at first: {', '.join(COMMANDS)}")
    return COMMANDS[command](argv)


if __name__ == "__main__":
    first = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    if first:
        del sys.argv[1]
    run_main(functools.partial(_main, first))
