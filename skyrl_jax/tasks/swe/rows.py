"""SWE-bench rows: one value, and a loader for JSON, JSONL and parquet files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import DataError

_REQUIRED = ("repo", "base_commit", "problem_statement", "patch", "test_patch")
_KNOWN = {*_REQUIRED, "instance_id", "FAIL_TO_PASS", "PASS_TO_PASS", "test_cmd", "version"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweRow:
    """One SWE-bench row.

    ``test_cmd`` is what the agent may run (``""``: the row names none). ``extra`` holds every other
    field of the source row.
    Example: ``SweRow(instance_id="sympy__sympy-20916", repo="sympy/sympy", ...)``.
    """

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_cmd: str = ""
    version: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the row as SWE-bench writes it (own fields beside it)."""
        return {
            **self.extra,
            "instance_id": self.instance_id,
            "repo": self.repo,
            "base_commit": self.base_commit,
            "problem_statement": self.problem_statement,
            "patch": self.patch,
            "test_patch": self.test_patch,
            "FAIL_TO_PASS": list(self.fail_to_pass),
            "PASS_TO_PASS": list(self.pass_to_pass),
            "test_cmd": self.test_cmd,
            "version": self.version,
        }


def parse_row(values: Mapping[str, Any], where: str = "row") -> SweRow:
    """Turn a mapping into a row; a row nested under ``instance`` is taken out first.

    Args:
        values: the row as loaded.
        where: names the row in messages when it has no instance id.

    Raises:
        DataError: a field is missing or has the wrong form; the message names both.
    """
    if not isinstance(values, Mapping):
        raise DataError(f"{where}: a row must be an object, got {type(values).__name__}")
    values = _unwrap(values)
    name = values.get("instance_id")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}: field 'instance_id' must be a non-empty string, got {name!r}")
    texts = {key: _text(values, key, name) for key in _REQUIRED}
    for key in ("patch", "test_patch"):
        if texts[key] and not texts[key].endswith("\n"):
            texts[key] += "\n"
    fail_to_pass = _names(values, "FAIL_TO_PASS", name)
    if not fail_to_pass:
        raise DataError(f"{name}: field 'FAIL_TO_PASS' names no test; such a row cannot be graded")
    return SweRow(
        instance_id=name,
        fail_to_pass=fail_to_pass,
        pass_to_pass=_names(values, "PASS_TO_PASS", name),
        test_cmd=str(values.get("test_cmd") or ""),
        version=str(values.get("version") or ""),
        extra={key: value for key, value in values.items() if key not in _KNOWN},
        **texts,
    )


def load_rows(path: str | Path) -> tuple[SweRow, ...]:
    """Load a file of rows: JSON (list, or one object, or {id: row}), JSONL or parquet.

    Raises:
        DataError: the file cannot be read or holds a bad row or the same id twice.
    """
    path = Path(path)
    try:
        values = _load(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path.name}: cannot be read as SWE-bench rows: {error}") from error
    rows = tuple(parse_row(value, f"{path.name} row {at}") for at, value in enumerate(values))
    if not rows:
        raise DataError(f"{path.name}: holds no rows")
    seen: set[str] = set()
    for row in rows:
        if row.instance_id in seen:
            raise DataError(f"{row.instance_id}: field 'instance_id' occurs twice in {path.name}")
        seen.add(row.instance_id)
    return rows


def _load(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]  # seconds to import; seldom needed

        return list(pyarrow.parquet.read_table(path).to_pylist())
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    values = json.loads(text)
    if isinstance(values, list):
        return values
    if isinstance(values, dict) and "instance_id" not in _unwrap(values):
        return list(values.values())
    return [values]


def _unwrap(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take a row out of the wrappers seen in the field (``instance``, as text or as an object)."""
    for key in ("instance", "instance_dict", "metadata", "responses_create_params"):
        inner = values.get(key)
        if isinstance(inner, str) and inner.lstrip().startswith("{"):
            try:
                inner = json.loads(inner)
            except ValueError:
                continue
        if isinstance(inner, Mapping) and "FAIL_TO_PASS" not in values:
            found = _unwrap(inner)
            if "FAIL_TO_PASS" in found:
                return {**{k: v for k, v in values.items() if k == "instance_id"}, **found}
    return values


def _text(values: Mapping[str, Any], key: str, name: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise DataError(f"{name}: field {key!r} must be a string, got {type(value).__name__}")
    return value


def _names(values: Mapping[str, Any], key: str, name: str) -> tuple[str, ...]:
    value = values.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(
                f"{name}: field {key!r} is text but not a JSON list: {error}"
            ) from error
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{name}: field {key!r} must be a list of strings, got {value!r:.60}")
    return tuple(value)
