"""Is a task sound? One sandbox and one command: tests before and after the gold patch."""

from __future__ import annotations

from skyrl_jax.core.errors import AgentCausedError
from skyrl_jax.core.protocols import ExecResult, SandboxProvider, SandboxSpec
from skyrl_jax.tasks.swe.logs import PASSED, parse_light_log
from skyrl_jax.tasks.swe.reward import encode_request, make_nonce, run_operations
from skyrl_jax.tasks.swe.rows import SweRow


async def validate_row(
    row: SweRow,
    hidden: dict[str, str],
    provider: SandboxProvider,
    spec: SandboxSpec,
    timeout_s: float,
) -> str:
    """Return why a synthetic row is unusable, or ``""``. Host errors propagate."""
    tests = "\0".join(hidden).encode()
    operations = [
        ("run", "\0".join(row.extra["test_files"]).encode()),
        *((f"write {path}", text.encode()) for path, text in hidden.items()),
        ("run", tests),
        ("apply", row.patch.encode()),
        ("run", tests),
    ]
    nonces = [make_nonce() for _ in range(3)]
    try:
        request = encode_request(operations, nonces)
        result = await run_operations(provider, spec, request, timeout_s)
    except AgentCausedError as error:
        return f"the sandbox ended: {error}"
    return explain(row, result, nonces)


def explain(row: SweRow, result: ExecResult, nonces: list[str]) -> str:
    """Return what the log of a validation run shows to be wrong, or ``""``."""
    if result.timed_out or result.oom_killed:
        return "the tests ran out of time or memory"
    sections = []
    rest = result.output
    for nonce in nonces:
        section, mark, rest = rest.partition(f"\nREPORT {nonce} ")
        if not mark:
            return f"no report in: {result.output[-200:]!r}"
        sections.append(section)
        rest = rest.partition("\n")[2]
    visible, before, after = sections
    if visible != row.extra["visible_log"]:
        return f"the visible tests print {visible!r}, not {row.extra['visible_log']!r}"
    start, end = parse_light_log(before), parse_light_log(after)
    for name in row.fail_to_pass:
        if start.get(name) == PASSED or end.get(name) != PASSED:
            return f"{name}: {start.get(name)} before and {end.get(name)} after the gold patch"
    for name in row.pass_to_pass:
        if start.get(name) != PASSED or end.get(name) != PASSED:
            return f"{name}: {start.get(name)} before and {end.get(name)} after the gold patch"
    return ""
