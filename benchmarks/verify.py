"""Measure what an issue promises, part by part, and write docs/verify/NAME.json.

Command: ``python benchmarks/verify.py 01-main-job|02-learner [--only=PART,...] [--again] [--list]``
Parts whose result for this code is already in docs/verify/NAME.json are not run again, so a
verification of hours goes on over several sessions; a commit that changes only docs/ or *.md
keeps them. Runs in a fresh clone under .cache/verify/. Needs ../shared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gateway_promises
import learner_promises
import main_job
import sandbox_promises
from checks import (
    ROOT,
    Clone,
    CommandFailed,
    Outcome,
    Part,
    changed_files,
    commit,
    fresh_clone,
    tree_fingerprint,
)

SUITES: dict[str, Sequence[Part]] = {
    "01-main-job": main_job.PARTS,
    "02-learner": learner_promises.PARTS,
    "03-gateway": gateway_promises.PARTS,
    "04-sandboxes": sandbox_promises.PARTS,
}


def main(argv: Sequence[str]) -> int:
    """Run the parts of a suite that have no result yet; 0 when every part of it held."""
    options = _options(argv)
    parts = SUITES[options.name]
    if options.list:
        for part in parts:
            print(f"{part.name}: {part.promise}")
        return 0
    wanted = options.only.split(",") if options.only else [part.name for part in parts]
    unknown = sorted(set(wanted) - {part.name for part in parts})
    if unknown:
        print(f"no part {unknown[0]!r}; parts: {', '.join(p.name for p in parts)}")
        return 2
    shared = ROOT.parent / "shared"
    if not shared.is_dir():
        print("verify: ../shared is missing; the real rows and the reference figures lie there")
        return 2
    changed = changed_files()
    if changed:
        print(f"verify: commit first, these differ from HEAD: {', '.join(changed[:5])}")
        return 2
    report = ROOT / "docs" / "verify" / f"{options.name}.json"
    fingerprint = tree_fingerprint()
    state = _load(report, fingerprint, again=wanted if options.again else [])
    clone = fresh_clone(fingerprint, shared)
    for part in parts:
        if part.name in wanted and part.name not in state["parts"]:
            state["parts"][part.name] = _run(part, clone, state["parts"])
            _save(report, state, parts)
    return _tell(state, parts)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", choices=sorted(SUITES))
    parser.add_argument("--only", default="", help="comma-separated parts")
    parser.add_argument("--again", action="store_true", help="run the wanted parts once more")
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    return parser.parse_args(argv)


def _load(report: Path, fingerprint: str, again: Sequence[str]) -> dict[str, Any]:
    """Return the results that stand for this code, or an empty state."""
    state: dict[str, Any] = {"code": fingerprint, "parts": {}}
    if report.exists():
        stored = json.loads(report.read_text())
        if stored.get("code") == fingerprint:
            state["parts"] = {k: v for k, v in stored["parts"].items() if k not in again}
    return state


def _run(part: Part, clone: Clone, earlier: dict[str, Any]) -> dict[str, Any]:
    print(f"{part.name}: {part.promise} ...", flush=True)
    began = time.time()
    figures = {name: result["figures"] for name, result in earlier.items()}
    try:
        outcome = part.run(clone, figures)
    except (CommandFailed, OSError, KeyError, ValueError) as error:
        # A part that cannot be measured has not held; the other parts still run.
        outcome = Outcome(held=False, figures={"error": f"{type(error).__name__}: {error}"})
    told = without_root(dict(outcome.figures), str(clone.root))
    print(f"{part.name}: {'held' if outcome.held else 'NOT HELD'} {told}", flush=True)
    return {
        "promise": part.promise,
        "held": outcome.held,
        "figures": told,
        "seconds": round(time.time() - began, 1),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}",
    }


def without_root(value: Any, root: str) -> Any:
    """Return figures whose texts name files from the clone's root on: where it lies is nobody's."""
    if isinstance(value, str):
        return value.replace(f"{root}/", "").replace(root, ".")
    if isinstance(value, dict):
        return {key: without_root(item, root) for key, item in value.items()}
    return [without_root(item, root) for item in value] if isinstance(value, list) else value


def _save(report: Path, state: dict[str, Any], parts: Sequence[Part]) -> None:
    done = state["parts"]
    state["held"] = all(part.name in done and done[part.name]["held"] for part in parts)
    state["commit"] = commit()
    report.parent.mkdir(parents=True, exist_ok=True)
    partial = report.with_suffix(".part")
    partial.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    partial.replace(report)


def _tell(state: dict[str, Any], parts: Sequence[Part]) -> int:
    words = {True: "held", False: "NOT HELD", None: "not run"}
    done = {name: result["held"] for name, result in state["parts"].items()}
    for part in parts:
        print(f"  {words[done.get(part.name)]:9} {part.name}")
    held = all(done.get(part.name) for part in parts)
    print(f"{sum(map(bool, done.values()))} of {len(parts)} parts held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
