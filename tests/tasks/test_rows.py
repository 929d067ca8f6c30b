"""SWE-bench rows in every form they come in, and what bad ones say."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from skyrl_jax.core.errors import DataError
from skyrl_jax.tasks.swe.rows import SweRow, load_rows, parse_row
from skyrl_jax.tasks.swe.rows_suite import select_rows

ROW = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "problem_statement": "It is wrong.",
    "patch": "diff --git a/x b/x\n",
    "test_patch": "diff --git a/t b/t",
    "FAIL_TO_PASS": ["t::x"],
    "PASS_TO_PASS": [],
}


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def test_list_and_string_encoded_test_names_are_the_same_row():
    text = {**ROW, "FAIL_TO_PASS": '["t::x"]', "PASS_TO_PASS": "[]"}
    assert parse_row(ROW) == parse_row(text)
    assert parse_row(ROW).fail_to_pass == ("t::x",)


def test_a_patch_without_final_newline_gets_one():
    assert parse_row(ROW).test_patch.endswith("b/t\n")


def test_unknown_fields_are_kept():
    row = parse_row({**ROW, "difficulty": "1 hour"})
    assert row.extra == {"difficulty": "1 hour"}
    assert parse_row(row.to_json()) == row


def test_every_container_gives_the_same_rows(tmp_path):
    other = {**ROW, "instance_id": "a__b-2"}
    (tmp_path / "list.json").write_text(json.dumps([ROW, other]))
    (tmp_path / "dict.json").write_text(json.dumps({"a__b-1": ROW, "a__b-2": other}))
    (tmp_path / "lines.jsonl").write_text(json.dumps(ROW) + "\n\n" + json.dumps(other) + "\n")
    (tmp_path / "one.json").write_text(json.dumps(ROW))
    table = pyarrow.Table.from_pylist(
        [{**ROW, "PASS_TO_PASS": "[]"}, {**other, "PASS_TO_PASS": "[]"}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    expected = (parse_row(ROW), parse_row(other))
    for name in ("list.json", "dict.json", "lines.jsonl", "rows.parquet"):
        assert load_rows(tmp_path / name) == expected, name
    assert load_rows(tmp_path / "one.json") == expected[:1]


def test_a_nested_instance_is_taken_out():
    assert parse_row({"instance": ROW, "agent_ref": {}}) == parse_row(ROW)
    wrapped = {"instance_id": "a__b-1", "metadata": {"instance_dict": json.dumps(ROW)}}
    assert parse_row(wrapped) == parse_row(ROW)


def test_the_real_rows_of_the_wheel_are_read(downloads, tmp_path):
    import zipfile

    (wheel,) = downloads.glob("nemo_gym-0.4.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = "responses_api_agents/{}/data/example.jsonl"
        for agent, count in (("mini_swe_agent_2", 5), ("mini_swe_agent", 5), ("swe_agents", 1)):
            path = tmp_path / f"{agent}.jsonl"
            path.write_bytes(archive.read(name.format(agent)))
            rows = load_rows(path)
            assert len(rows) == count
            assert all(isinstance(row, SweRow) and row.fail_to_pass for row in rows)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"instance_id": ""}, ("instance_id",)),
        ({"patch": None}, ("a__b-1", "patch")),
        ({"repo": 3}, ("a__b-1", "repo")),
        ({"FAIL_TO_PASS": "not json"}, ("a__b-1", "FAIL_TO_PASS")),
        ({"FAIL_TO_PASS": []}, ("a__b-1", "FAIL_TO_PASS")),
        ({"PASS_TO_PASS": {"x": 1}}, ("a__b-1", "PASS_TO_PASS")),
        ({"PASS_TO_PASS": [1]}, ("a__b-1", "PASS_TO_PASS")),
    ],
)
def test_a_bad_row_is_named_with_its_field(change, words):
    with pytest.raises(DataError) as caught:
        parse_row({**ROW, **change})
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", '"x"'])
def test_a_bad_file_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"rows\.json"):
        load_rows(path)


def test_absent_files_and_double_ids_are_errors(tmp_path):
    with pytest.raises(DataError, match="none"):
        load_rows(tmp_path / "none.json")
    write_rows(tmp_path / "twice.jsonl", [ROW, ROW])
    with pytest.raises(DataError, match="twice"):
        load_rows(tmp_path / "twice.jsonl")


def test_selection_keeps_the_order_and_refuses_unknown_ids(tmp_path):
    other = {**ROW, "instance_id": "a__b-2"}
    write_rows(tmp_path / "rows.jsonl", [ROW, other])
    chosen = select_rows(tmp_path / "rows.jsonl", ["a__b-2", "a__b-1"])
    assert [row.instance_id for row in chosen] == ["a__b-2", "a__b-1"]
    with pytest.raises(DataError, match="a__b-9"):
        select_rows(tmp_path / "rows.jsonl", ["a__b-9"])
