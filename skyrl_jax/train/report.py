"""WORKDIR/report.html: one self-contained page of a run, for a person with a browser.

Reads metrics.jsonl, summary.json, config.json and rollouts/. The page holds no script and no link,
and forbids both to itself (Content-Security-Policy): whatever an agent or a task printed is shown
as text, and the page works without a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_jax.train.charts import Series, legend, line_chart, stacked_chart, text
from skyrl_jax.train.report_style import STYLE
from skyrl_jax.train.rollouts import read_rollouts
from skyrl_jax.train.tracker import read_metrics

# (title, unit, metric names): one chart each, where the run has them.
CURVES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Resolved rate, training tasks",
        "share of the step's episodes",
        ("resolved_rate_fresh", "resolved_rate"),
    ),
    ("Reward", "mean over the step's episodes", ("reward_mean",)),
    ("Loss", "", ("loss",)),
    ("Entropy", "nats per token", ("entropy_mean",)),
    ("Clipped tokens", "share of trained tokens", ("clip_low_fraction", "clip_high_fraction")),
    ("Engine against learner", "mean |log-prob difference|, nats", ("mismatch_abs_mean",)),
)
SECONDS = ("wait_s", "pack_s", "step_s", "publish_s", "checkpoint_s")
# Summary pairs X_before / X_after in the order and words of the table; other pairs follow.
PAIRS = {
    "resolved": "held-out tasks, sampled",
    "greedy": "held-out tasks, greedy",
    "resolved_sft_kinds": "held-out tasks, mutation kinds the warm start saw",
    "resolved_new_kinds": "held-out tasks, mutation kinds it never saw",
    "resolved_new_bodies": "held-out tasks, broken functions in no training text",
    "resolved_unseen": "functions never seen, sampled",
}
MAX_CONTENT = 6000  # characters of one message in the page; the rollout file has all of it


def write_report(workdir: Path) -> Path:
    """Build the page from what the run folder holds and return its path."""
    summary = _load(workdir / "summary.json")
    config = _load(workdir / "config.json")
    metrics = read_metrics(workdir / "metrics.jsonl")
    body = "\n".join(
        [
            _header(summary, config),
            _table(summary),
            _curves(metrics, summary.get("resolved_curve") or ()),
            _transcripts(sample_episodes(workdir / "rollouts")),
            _values("Summary", summary),
            _values("Configuration", config),
        ]
    )
    path = workdir / "report.html"
    partial = path.with_name("report.html.partial")
    # What an agent printed may hold lone surrogates, which UTF-8 cannot: they become "?".
    partial.write_bytes(page(_title(config), body).encode("utf-8", errors="replace"))
    os.replace(partial, path)
    return path


def page(title: str, body: str) -> str:
    """Wrap a body into a page that may load and run nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def sample_episodes(folder: Path, *, per_kind: int = 2) -> list[tuple[str, dict[str, Any]]]:
    """Return (step name, episode) of the first, middle and last step, resolved and not.

    Args:
        folder: WORKDIR/rollouts.
        per_kind: resolved episodes, and as many others, of each of the three steps.
    """
    files = sorted(folder.glob("step_*.jsonl"))
    chosen = [files[i] for i in sorted({0, len(files) // 2, len(files) - 1})] if files else []
    picked: list[tuple[str, dict[str, Any]]] = []
    for path in chosen:
        counts = {True: 0, False: 0}
        for episode in read_rollouts(path):
            resolved = _verdict(episode) == "resolved"
            if counts[resolved] < per_kind:
                counts[resolved] += 1
                picked.append((path.stem.replace("_", " "), episode))
            if min(counts.values()) >= per_kind:
                break
    return picked


def _title(config: Mapping[str, Any]) -> str:
    return f"{config.get('name', 'run')} · seed {config.get('seed', '?')}"


def _header(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    tiles = [
        _tile("resolved before", _percent(summary.get("resolved_before")), _measured(summary)),
        _tile("resolved after", _percent(summary.get("resolved_after"))),
        _tile("gain", _points(summary.get("gain")), _ends(summary, "gain_low", "gain_high")),
        _tile("steps", _plain(summary.get("steps"))),
        _tile("training episodes", _plain(summary.get("rl_episodes"))),
        _tile("time", _minutes(summary.get("wall_s")), _setup(summary)),
    ]
    title = f"<h1>{text(_title(config))}</h1>{_ending(summary, config)}"
    return f'{title}<div class="tiles">{"".join(tiles)}</div>'


def _ending(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Say when and why the run ended, and where it began."""
    if "ended" not in summary:
        return ""
    words = f"{summary.get('finished', '')} · ended: {summary['ended']}"
    if summary.get("sft_steps"):
        words += f" · warm start: {summary['sft_steps']:.0f} steps"
    bad = ""
    if not summary.get("steps") and config.get("train.steps"):
        bad = (
            '<p class="bad">No RL step was made: the time limit was over before the first one. Go '
            "on with the same --workdir and a higher --config.train.time_limit_s.</p>"
        )
    return f'<p class="note">{text(words)}</p>{bad}'


def _tile(name: str, value: str, below: str = "") -> str:
    return (
        f'<div class="tile"><div class="name">{text(name)}</div>'
        f'<div class="value">{text(value)}</div><div class="below">{text(below)}</div></div>'
    )


def _table(summary: Mapping[str, Any]) -> str:
    """Tabulate every X_before / X_after pair, with intervals where the summary has them."""
    found = [key[: -len("_before")] for key in summary if key.endswith("_before")]
    found = [key for key in found if f"{key}_after" in summary]
    order = [key for key in PAIRS if key in found] + [key for key in found if key not in PAIRS]
    if not order:
        return ""
    rows = []
    for key in order:
        before, after = summary[f"{key}_before"], summary[f"{key}_after"]
        prefix = "gain" if key == "resolved" else f"{key}_gain"
        gain = summary.get(prefix, _difference(before, after))
        cells = [
            text(PAIRS.get(key, key)),
            text(_percent(before)) + _small(_range(summary, f"{key}_before")),
            text(_percent(after)) + _small(_range(summary, f"{key}_after")),
            text(_points(gain)) + _small(_ends(summary, f"{prefix}_low", f"{prefix}_high")),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>resolved</th><th>before</th><th>after</th><th>gain</th></tr>"
    note = "Ranges are 95 % bootstrap intervals over tasks."
    return (
        f'<h2>Before and after</h2><table>{head}{"".join(rows)}</table><p class="note">{note}</p>'
    )


def _curves(metrics: Sequence[Mapping[str, Any]], heldout: Sequence[Sequence[float]]) -> str:
    charts = []
    if heldout:
        series = [
            Series(name="sampled episodes of held-out tasks", points=[(x, y) for x, y in heldout])
        ]
        chart = line_chart(series, smooth=False, dots=True)
        charts.append(_card("Resolved rate, held-out tasks", "share of episodes", chart, series))
    charts += [
        _card(title, unit, line_chart(series), series)
        for title, unit, names in CURVES
        if (series := _series(metrics, names))
    ]
    seconds = _series([{**dict.fromkeys(SECONDS, 0.0), **row} for row in metrics], SECONDS)
    if any(y for item in seconds for _, y in item.points):
        charts.append(_card("Where a step's time goes", "s", stacked_chart(seconds), seconds))
    known = {name for _, _, names in CURVES for name in names} | {*SECONDS, "step", "time"}
    others = sorted({key for row in metrics for key in row} - known)
    more = [
        _card(name, "", line_chart(series), series)
        for name in others
        if (series := _series(metrics, (name,)))
    ]
    grid = f'<h2>Curves</h2><div class="grid-of-charts">{"".join(charts)}</div>'
    if more:
        grid += (
            f"<details><summary>{len(more)} more metrics</summary>"
            f'<div class="grid-of-charts">{"".join(more)}</div></details>'
        )
    return grid if charts or more else ""


def _series(metrics: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[Series]:
    rows = list(metrics)
    found = []
    for name in names:
        points = [(r["step"], r[name]) for r in rows if isinstance(r.get(name), int | float)]
        if points:
            found.append(Series(name=name, points=points))
    return found


def _card(title: str, unit: str, chart: str, series: Sequence[Series]) -> str:
    keys = legend([item.name for item in series]) if len(series) > 1 else ""
    return (
        f'<figure><figcaption>{text(title)} <span class="unit">{text(unit)}</span></figcaption>'
        f"{chart}{keys}</figure>"
    )


def _transcripts(episodes: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    if not episodes:
        return ""
    parts = [_transcript(step, episode) for step, episode in episodes]
    return f"<h2>Some episodes</h2>{''.join(parts)}"


def _transcript(step: str, episode: Mapping[str, Any]) -> str:
    verdict = _verdict(episode)
    mark = "good" if verdict == "resolved" else "bad"
    sampled = sum(turn["num_completion"] for turn in episode["turns"])
    ended = f"{episode['status']} ({episode['reason']})"
    told = f"{ended}, {len(episode['turns'])} turns, {sampled} sampled tokens"
    messages = "".join(_message(message) for message in episode["messages"])
    diff = episode.get("submission")
    graded = f'<div class="role">graded diff</div><pre>{_cut(diff)}</pre>' if diff else ""
    return (
        f'<details><summary><span class="{mark}">{text(verdict)}</span> {text(step)} · '
        f'{text(episode["task_id"])}/{text(episode["sample_index"])} <span class="unit">'
        f"{text(told)}</span></summary>{messages}{graded}</details>"
    )


def _message(message: Mapping[str, Any]) -> str:
    error = message.get("error")
    wrong = f'<div class="bad">not parsed: {text(error)}</div>' if error else ""
    reasoning = message.get("reasoning")  # files of older versions have none
    thought = f'<div class="role">reasoning</div><pre>{_cut(reasoning)}</pre>' if reasoning else ""
    role = (
        message["role"] if message["role"] in ("system", "user", "assistant", "tool") else "other"
    )
    return (
        f'<div class="message {role}"><div class="role">{text(message["role"])}</div>'
        f"{thought}<pre>{_cut(message['content'])}</pre>{wrong}</div>"
    )


def _values(title: str, values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    rows = "".join(
        f"<tr><td>{text(key)}</td><td>{text(json.dumps(value))}</td></tr>"
        for key, value in sorted(values.items())
    )
    return f"<details><summary>{text(title)}</summary><table>{rows}</table></details>"


def _verdict(episode: Mapping[str, Any]) -> str:
    score = episode.get("score")
    return str(score["verdict"] if score else episode["status"])


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _cut(content: str) -> str:
    if len(content) <= MAX_CONTENT:
        return text(content)
    half = MAX_CONTENT // 2
    left_out = len(content) - 2 * half
    return text(f"{content[:half]}\n[... {left_out} characters left out ...]\n{content[-half:]}")


def _small(value: str) -> str:
    return f' <span class="unit">{text(value)}</span>' if value else ""


def _range(summary: Mapping[str, Any], key: str) -> str:
    low, high = summary.get(f"{key}_low"), summary.get(f"{key}_high")
    return "" if low is None or high is None else f"{_percent(low)} to {_percent(high)}"


def _ends(summary: Mapping[str, Any], low: str, high: str) -> str:
    if summary.get(low) is None or summary.get(high) is None:
        return ""
    return f"{_points(summary[low])} to {_points(summary[high])}"


def _measured(summary: Mapping[str, Any]) -> str:
    episodes, tasks = summary.get("episodes"), summary.get("tasks")
    return "" if episodes is None else f"{episodes} episodes of {tasks} tasks"


def _setup(summary: Mapping[str, Any]) -> str:
    setup_s = summary.get("setup_s")
    return "" if setup_s is None else f"setup {_minutes(setup_s)}"


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _plain(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}"


def _minutes(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
