"""Synthetic repair tasks: correct small functions, one broken in one line, in a git repository.

Everything follows from a string seed; nothing depends on hash order, time or the machine.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_jax.tasks.swe.cases import Case, compare
from skyrl_jax.tasks.swe.diffs import change_diff, new_file_diff
from skyrl_jax.tasks.swe.mutate import SFT_KINDS, Mutant, apply_mutant, mutants
from skyrl_jax.tasks.swe.repo import commit_id
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.snippet import edit_snippet
from skyrl_jax.tasks.swe.templates import TEMPLATES, Function, Template, pool, render

RUNNER = "python3 -S -E /opt/swe/runner.py"
PACKAGES = ("app", "kit", "shop", "lab", "core")
MODULES = ("nums", "lists", "misc", "calc", "text", "util")
MAX_FAILURE = 64  # characters of a quoted failure line
_TRIES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bug:
    function: Function
    mutant: Mutant
    broken: str
    failing: tuple[Case, ...]
    passing: tuple[Case, ...]


def make_split(
    split: str, count: int, seed: int, avoid: set[str], templates: int = 0
) -> list[SweRow]:
    """Make the tasks of a split.

    Args:
        split: "train", "heldout" (same templates, other instances) or "unseen" (other templates).
        count: how many.
        seed: of task making.
        avoid: keys of broken functions that may not occur; the new ones are added.
        templates: how many of the shortest templates to use (0: all).
    """
    rows: list[SweRow] = []
    chosen = pool(templates, unseen=split == "unseen")
    for number in _counting():
        if len(rows) >= count:
            return rows
        row = make_row(f"{seed}/{split}/{number}", f"{split}-{number}", chosen)
        if row is None or row.extra["key"] in avoid:
            continue
        avoid.add(str(row.extra["key"]))
        rows.append(row)
    return rows


def make_splits(
    train: int, heldout: int, unseen: int, seed: int, templates: int = 0
) -> dict[str, list[SweRow]]:
    """Make all three splits; no broken function occurs twice in any of them."""
    avoid: set[str] = set()
    return {  # held-out first: its instances do not depend on how many there are to train on
        "heldout": make_split("heldout", heldout, seed, avoid, templates),
        "unseen": make_split("unseen", unseen, seed, avoid, templates),
        "train": make_split("train", train, seed, avoid, templates),
    }


def make_row(seed: str, name: str, pool: Sequence[Template]) -> SweRow | None:
    """Make one task, or ``None`` when nothing fits in some tries."""
    rng = random.Random(f"skyrl-swe/{seed}")
    for _ in range(_TRIES):
        bug = _make_bug(rng, rng.choice(list(pool)))
        row = _make_repository(rng, name, bug) if bug else None
        if row is not None:
            return row
    return None


def function_key(source: str) -> str:
    """Return the identity of a function: its code with names and literals, without formatting."""
    return hashlib.sha256(ast.dump(ast.parse(source)).encode()).hexdigest()[:16]


def _counting() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _make_bug(rng: random.Random, template: Template) -> _Bug | None:
    function = render(template, rng)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants(function.source):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    mutant = rng.choice(by_kind[rng.choice(sorted(by_kind))])
    broken = apply_mutant(function.source, mutant)
    if broken.count(mutant.buggy.strip()) != 1:
        return None
    cases = compare(function, broken, rng)
    failing = [case for case in cases if case.failure]
    passing = [case for case in cases if not case.failure]
    if any(case.failure == "timeout" for case in cases):
        return None  # an endless loop costs more CPU than it teaches
    silly = all(case.raised in ("TypeError", "AttributeError") for case in failing)
    if len(failing) < 4 or silly or not any(len(c.failure) <= MAX_FAILURE for c in failing):
        return None
    return _Bug(
        function=function,
        mutant=mutant,
        broken=broken,
        failing=tuple(failing),
        passing=tuple(passing),
    )


def _make_repository(rng: random.Random, name: str, bug: _Bug) -> SweRow | None:
    package = rng.choice(PACKAGES)
    names = rng.sample(MODULES, rng.randint(2, 3))
    taken = {bug.function.name}
    modules: dict[str, list[Function]] = {}
    known = [template for template in TEMPLATES if not template.unseen]
    for at, module in enumerate(names):
        others = rng.randint(1, 2) if at == 0 else rng.randint(2, 3)
        modules[module] = []
        for template in rng.sample(known, others):
            if template.name == bug.function.template:
                continue
            function = render(template, rng, frozenset(taken))
            if function.name not in taken:
                taken.add(function.name)
                modules[module].append(function)
    others_here = modules[names[0]]
    place = rng.randint(0, len(others_here))
    path = f"{package}/{names[0]}.py"
    sources = [function.source for function in others_here]
    before = "\n\n".join([*sources[:place], bug.broken, *sources[place:]])
    after = "\n\n".join([*sources[:place], bug.function.source, *sources[place:]])
    if not others_here or before.count(bug.mutant.buggy.strip()) != 1:
        return None
    files = {f"{package}/__init__.py": f'"""Small helpers: {", ".join(names)}."""\n'}
    for module in names[1:]:
        if not modules[module]:
            return None
        files[f"{package}/{module}.py"] = "\n\n".join(f.source for f in modules[module])
        files[f"tests/test_{module}.py"] = _tests(
            f"{package}.{module}", _easy(modules[module], rng, 1)
        )
    files[path] = before
    return _row(rng, name, bug, others_here, files, path, after)


def _easy(functions: Sequence[Function], rng: random.Random, count: int) -> dict[str, list[Case]]:
    """Return one test per correct function."""
    return {
        f"test_{function.name}": sorted(compare(function, None, rng)[:6], key=_length)[:count]
        for function in functions
    }


def _length(case: Case) -> tuple[int, str]:
    return len(case.failure or case.call), case.call


def _tests(module: str, tests: dict[str, list[Case]]) -> str:
    functions = sorted({case.call.partition("(")[0] for cases in tests.values() for case in cases})
    text = f"from {module} import {', '.join(functions)}\n"
    for name, cases in tests.items():
        body = "".join(f"    assert {case.call} == {case.want}\n" for case in cases)
        text += f"\n\ndef {name}():\n{body}"
    return text


def _row(
    rng: random.Random,
    name: str,
    bug: _Bug,
    others: Sequence[Function],
    files: dict[str, str],
    path: str,
    after: str,
) -> SweRow:
    package, module = path[:-3].split("/")
    target = bug.function.name
    short = [case for case in bug.failing if len(case.failure) <= MAX_FAILURE]
    shown = sorted(rng.sample(short, min(len(short), 4)), key=_length)[:2]
    seen_ok = sorted(bug.passing[:4], key=_length)[:1]
    visible = {f"test_{target}_{at + 1}": [case] for at, case in enumerate(shown + seen_ok)}
    hidden_bad = [case for case in bug.failing if case not in shown][:6]
    hidden_ok = [case for case in bug.passing if case not in seen_ok][:5]
    hidden = {f"test_{target}_new_{at}": hidden_bad[at::2] for at in (0, 1) if hidden_bad[at::2]}
    stay = _easy(others, rng, 3)
    if hidden_ok:
        stay[f"test_{target}_old"] = hidden_ok
    import_path = f"{package}.{module}"
    visible_path, hidden_path = f"tests/test_{module}.py", f"tests/test_{module}_more.py"
    files[visible_path] = _tests(import_path, {**visible, **_easy(others, rng, 1)})
    files["README.md"] = f"# {package}\nRun the tests of a module: `{RUNNER} {visible_path}`\n"
    log = _expected_log(visible_path, files[visible_path], bug)
    test_cmd = f"{RUNNER} {visible_path}"
    buggy, fixed = bug.mutant.buggy.strip(), bug.mutant.fixed.strip()
    old_str, new_str = edit_snippet(buggy, fixed, files[path])
    extra: dict[str, Any] = {
        "template": bug.function.template,
        "mutation": bug.mutant.kind,
        "sft": bug.mutant.kind in SFT_KINDS,
        "path": path,
        "function": bug.broken,
        "buggy_line": buggy,
        "fixed_line": fixed,
        "old_str": old_str,
        "new_str": new_str,
        "failures": [case.failure for case in shown],
        "test_files": [visible_path],
        "visible_log": log,
        "files": files,
        "key": function_key(bug.broken),
    }
    return SweRow(
        instance_id=f"{package}__{target}-{name}",
        repo=f"synthetic/{package}",
        base_commit=commit_id(files),
        problem_statement=f"`{target}` in {path} is wrong.\n\n$ {test_cmd}\n{log}",
        patch=change_diff(path, files[path], after),
        test_patch=new_file_diff(hidden_path, _tests(import_path, {**hidden, **stay})),
        fail_to_pass=tuple(f"{hidden_path}::{test}" for test in hidden),
        pass_to_pass=tuple(f"{hidden_path}::{test}" for test in stay),
        test_cmd=test_cmd,
        version="1",
        extra=extra,
    )


def _expected_log(path: str, text: str, bug: _Bug) -> str:
    """Return what the runner prints for the visible tests (validation compares the real thing)."""
    failures = {f"{case.call} == {case.want}": case.failure for case in bug.failing}
    lines, failed = [], 0
    for block in text.split("\n\n\ndef ")[1:]:
        name, _, body = block.partition("():\n")
        failure = failures.get(body.strip().removeprefix("assert "), "")
        failed += bool(failure)
        word = "FAILED" if failure else "PASSED"
        lines.append(f"{word} {path}::{name}" + (f" - {failure}" if failure else ""))
    return "\n".join([*lines, f"{len(lines) - failed} passed, {failed} failed"]) + "\n"
