"""What section 4b of faults.md says of shipped chat templates, and where we know that it is wrong.

faults.md (../shared/reference) has one row for a family of templates, written for people: "qwen3_8
(+training)", "H@2 everywhere", "DIFF (same in training)". Here it becomes one verdict per template
and column, as ``launchers/doctor.py template --json`` names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

COLUMNS = ("tool", "think_tool", "think_user", "user_after_tool", "ws", "par", "args")
VALUE = re.compile(r"ok|same|DIFF|raises|[PH]@\d+")
# Templates that a row means and does not spell out.
ALSO = {"llama3": ("llama3_1", "llama3_2")}
_REFUSED = dict.fromkeys(("tool", "think_tool", "user_after_tool"), "raises")
# Cells where 4b is silent ("-", "mixed") or wrong: template -> column -> what is measured.
CORRECTED: dict[str, dict[str, str]] = {
    # roles must alternate: an assistant turn behind a tool message is refused (4b: its text alone)
    "cohere2": {**_REFUSED, "args": "same"},
    "deepseek_r1_distill": {"args": "same"},
    "deepseekv3_training": {"args": "DIFF"},
    "llama3": {"args": "same"},
    # one call a message: two results in a row cannot be
    "llama3_1": {"par": "raises", "args": "DIFF"},
    "llama3_2": {"par": "raises", "args": "DIFF"},
    "lfm2": {"args": "same"},
}


def stated(text: str, templates: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what 4b says: {template: {column: verdict, "" where it states none}}.

    Args:
        text: faults.md.
        templates: all that there are, since a row may name them by a pattern.

    Raises:
        ValueError: there is no section 4b, a row names no template that there is, or two name one.
    """
    _, found, rest = text.partition("\n### 4b.")
    if not found:
        raise ValueError("faults.md has no section 4b")
    lines = [line for line in rest.partition("\n### ")[0].splitlines() if line.startswith("|")]
    header_and_rule, names = 2, sorted(templates)
    told: dict[str, dict[str, str]] = {}
    for line in lines[header_and_rule:]:
        first, *cells = (cell.strip() for cell in line.strip().strip("|").split("|"))
        for template in _named(first, names):
            if template in told:
                raise ValueError(f"two rows of section 4b name {template}")
            training = template.endswith("_training")
            told[template] = dict(zip(COLUMNS, _verdicts(cells, training), strict=True))
    if not told:
        raise ValueError("section 4b of faults.md has no row")
    return told


def differences(
    found: Mapping[str, Mapping[str, str]],
    told: Mapping[str, Mapping[str, str]],
    corrected: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Return what is neither as 4b says nor as its corrections do, a line for each cell.

    Args:
        found: {template: {column: verdict}} as measured.
        told: as ``stated`` returns it.
        corrected: cells that go before those of ``told``; one that agrees with 4b is stale.
    """
    gaps = []
    for template, row in found.items():
        if tuple(row) != COLUMNS or not all(VALUE.fullmatch(value) for value in row.values()):
            gaps.append(f"{template}: no verdict in every column: {dict(row)}")
    for template, says in told.items():
        ours = corrected.get(template, {})
        for column, said in says.items():
            want, is_ = ours.get(column, said), found.get(template, {}).get(column)
            if is_ != want:
                known = "the corrections say" if column in ours else "4b says"
                gaps.append(f"{template} {column}: {is_}, {known} {want or 'nothing'}")
            elif column in ours and ours[column] == said:
                gaps.append(f"{template} {column}: 4b says {said} too, no correction")
    gaps += [f"{template}: corrected, not in 4b" for template in corrected if template not in told]
    return gaps


def _named(cell: str, templates: list[str]) -> list[str]:
    """Return the templates that a row's first cell names."""
    found = []
    for part in cell.split(","):
        name, _, note = part.strip().partition("(")
        name = name.strip()
        wanted = [name, *ALSO.get(name, ())]
        wanted += [f"{name}_training"] if "+training" in note else []
        hits = [one for one in templates if any(fnmatchcase(one, want) for want in wanted)]
        if len(hits) < len(wanted):
            raise ValueError(f"section 4b names {part.strip()}; there is {hits or 'no such'}")
        found += hits
    return found


def _verdicts(cells: list[str], training: bool) -> list[str]:
    """Return the verdicts of a row's other cells; an "everywhere" holds until the next one."""
    found, standing = [], ""
    for cell in cells:
        match = VALUE.match(cell)
        value = match.group() if match else ""
        if "everywhere" in cell:
            standing = value
        if training and "in training" in cell:
            value = re.findall(rf"({VALUE.pattern}) in training", cell)[0]
        found.append(value or ("" if cell else standing))
    return found
