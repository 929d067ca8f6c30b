"""What section 4b of faults.md says is read whole, and a cell that differs is told."""

from __future__ import annotations

import json
import zipfile

import pytest

TEXT = """### 4a. Before
| qwen3 | raises | | | | | | |
### 4b. Measured
| template | tool | think_tool | think_user | then user | ws | par | args |
|---|---|---|---|---|---|---|---|
| qwen3_8(+training), nemo_* | P@6 | ok | P@4 | H@2 | ok | DIFF (same in training) | raises on str |
| phi3 | H@2 everywhere (end-of-text) | | | | | same | same |
| llama3, cohere2 (text) | ok | ok | ok | ok | ok | same | mixed |
Conclusions.
### 4c. After
| qwen3 | raises | | | | | | |
"""
NAMES = ("qwen3", "qwen3_8", "qwen3_8_training", "nemo_a", "nemo_b", "phi3", "llama3", "llama3_1",
         "llama3_2", "cohere2")  # fmt: skip
FIRST = ("P@6", "ok", "P@4", "H@2", "ok", "DIFF", "raises")


@pytest.fixture
def section(modules):
    return modules("section_4b")


def test_rows_by_hand(section):
    found = section.stated(TEXT, NAMES)
    rows = {name: tuple(row.values()) for name, row in found.items()}
    assert rows.pop("qwen3_8_training") == (*FIRST[:5], "same", "raises")
    for name in ("qwen3_8", "nemo_a", "nemo_b"):
        assert rows.pop(name) == FIRST
    assert rows.pop("phi3") == ("H@2",) * 5 + ("same",) * 2
    assert rows == dict.fromkeys(
        ("llama3", "llama3_1", "llama3_2", "cohere2"), ("ok",) * 5 + ("same", "")
    )


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("### 4c.", NAMES, "no section 4b"),
        (TEXT, [name for name in NAMES if name != "phi3"], "names phi3"),
        (TEXT, [name for name in NAMES if name != "qwen3_8_training"], "names qwen3_8"),
        (TEXT.replace("phi3", "nemo_a"), NAMES, "two rows .* name nemo_a"),
        (TEXT.partition("| qwen3_8")[0], NAMES, "has no row"),
    ],
)
def test_what_cannot_be_read_is_refused(section, text, names, words):
    with pytest.raises(ValueError, match=words):
        section.stated("\n" + text, names)


def test_every_cell_is_judged(section):
    told = {"a": dict(zip(section.COLUMNS, (*FIRST[:6], ""), strict=True))}
    right = {"a": told["a"] | {"args": "same"}, "b": dict.fromkeys(section.COLUMNS, "ok")}
    corrected = {"a": {"args": "same"}}
    assert section.differences(right, told, corrected) == []
    (gap,) = section.differences(right, told, {})
    assert gap == "a args: same, 4b says nothing"
    for column in section.COLUMNS:
        wrong = right | {"a": right["a"] | {column: "H@6"}}
        (gap,) = section.differences(wrong, told, corrected)
        assert gap.startswith(f"a {column}: H@6, ")
    assert len(section.differences({"b": right["b"]}, told, corrected)) == 7  # a was not run
    (gap,) = section.differences(right | {"b": {"tool": "ok"}}, told, corrected)
    assert gap.startswith("b: no verdict in every column")
    (gap,) = section.differences(right, told, {"a": {"args": "same", "ws": "ok"}})
    assert gap == "a ws: 4b says ok too, no correction"
    (gap,) = section.differences(right, told, corrected | {"c": {}})
    assert gap == "c: corrected, not in 4b"


def test_the_part_runs_the_doctor_on_every_template(modules, clone, section):
    promises = modules("gateway_promises")
    reference = "shared/reference/faults.md"

    def judge(answers, templates=NAMES):
        made = clone([(f"/{name}.jinja", status, text) for name, (status, text) in answers.items()])
        faults = made.root.parent / reference
        faults.parent.mkdir(parents=True, exist_ok=True)
        faults.write_text("\n" + TEXT)
        folder = made.root / ".cache" / "test-downloads"
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / "trl-1.16.0-py3-none-any.whl", "w") as wheel:
            for name in templates:
                wheel.writestr(f"trl/chat_templates/{name}.jinja", "x")
        return promises.templates(made, {})

    def answer(made, name, row):
        path = str(made / ".cache" / "templates" / f"{name}.jinja")
        return 0, json.dumps({"template": path, "matrix": dict(row)})

    root = clone().root
    said = section.stated("\n" + TEXT, NAMES)
    row = {column: "ok" for column in section.COLUMNS}
    good = {
        name: answer(root, name, {**row, **{k: v or "same" for k, v in said.get(name, {}).items()}})
        for name in NAMES
    }
    outcome = judge(good)
    assert not outcome.held and outcome.figures["templates"] == len(NAMES)  # the wheel has 72
    wrong = [gap for gap in outcome.figures["differences"] if gap.startswith("qwen3_8 ")]
    assert wrong == []
    outcome = judge(good | {"qwen3_8": answer(root, "qwen3_8", row)})
    wrong = [gap for gap in outcome.figures["differences"] if gap.startswith("qwen3_8 ")]
    assert len(wrong) == 5
    with pytest.raises(ValueError, match="names phi3"):  # the doctor failed on it
        judge(good | {"phi3": (2, good["phi3"][1])})
    with pytest.raises(ValueError, match="no JSON object"):
        judge(good | {"phi3": (0, "error")})
