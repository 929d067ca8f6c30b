"""One episode's world, in real sandboxes."""

import asyncio
import json

import pytest

from skyrl_jax.core.protocols import ExecResult
from skyrl_jax.core.types import ToolCall
from skyrl_jax.sandbox.fake import FakeProvider
from skyrl_jax.tasks.swe.environment import MAX_ARGUMENT, PASSED, opening
from skyrl_jax.tasks.swe.suite import hidden_files, task_row
from tests.tasks.worlds import bash, edit, in_bwrap, make_suite, rows


async def play(suite, task, provider, calls):
    """Return (opening text, answers, submission) of scripted calls."""
    environment = suite.environment(task, provider)
    try:
        (first,) = await environment.reset()
        answers = []
        for call in calls:
            result = await environment.step([call])
            answers.append(result.messages[0].content)
        return first.content, answers, await environment.submission()
    finally:
        await environment.close()


def test_a_right_edit_says_passed_and_a_wrong_one_shows_the_failure(tmp_path):
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    row = task_row(task)
    line = task.payload["buggy_line"] + "  # hm"
    right = ToolCall(
        name="str_replace_editor",
        arguments={
            "path": f"/testbed/{task.payload['path']}",
            "old_str": line,
            "new_str": task.payload["fixed_line"],
        },
    )
    first, answers, diff = in_bwrap(
        lambda p: play(suite, task, p, [edit(task, line), edit(task), right])
    )
    assert first == task.prompt == opening(row, compact=True)
    assert first.startswith(f"Fix {task.payload['path']}\ndef ")
    shown = [log.partition(" - ")[2] for log in row.extra["visible_log"].splitlines()]
    assert answers[0].splitlines()[0] == line
    assert answers[0].splitlines()[1] in shown
    assert answers[1].startswith(f"{line}\n") or answers[1].startswith("ok\n")
    assert answers[-1] in (PASSED, f"no match: {line}")
    assert diff.startswith("diff --git a/") and task.payload["fixed_line"] in diff


def test_errors_are_one_clear_line_and_an_untouched_tree_gives_an_empty_diff(tmp_path):
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    path = task.payload["path"]
    calls = [
        ToolCall(name="str_replace_editor", arguments={"path": "no.py", "old_str": "a"}),
        ToolCall(name="str_replace_editor", arguments={"path": path, "old_str": "zz"}),
        ToolCall(name="str_replace_editor", arguments={"path": "", "old_str": "zz"}),
        ToolCall(name="str_replace_editor", arguments={"path": "a\0b"}),
        ToolCall(name="str_replace_editor", arguments={"path": path, "old_str": "a\ud800"}),
        bash("echo \udcff"),
        ToolCall(
            name="str_replace_editor",
            arguments={"path": path, "old_str": "x" * (MAX_ARGUMENT + 1)},
        ),
        ToolCall(name="str_replace_editor", arguments={"command": "undo", "path": path}),
        bash("  "),
        ToolCall(name="browse", arguments={}),
    ]
    _, answers, diff = in_bwrap(lambda p: play(suite, task, p, calls))
    assert answers[:3] == ["no file: no.py", "no match: zz", "error: no path"]
    assert all(answer.startswith("error: ") for answer in answers[2:])
    assert diff == ""


def test_bash_runs_in_the_tree_and_its_output_is_normalised(tmp_path):
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    calls = [
        bash("pwd; git status --short; exit 3"),
        bash("true"),
        bash("python3 -c 'print(object(), hash(\"a\"))'"),
        bash("touch /opt/swe/runner.py || echo kept"),
    ]
    _, answers, _ = in_bwrap(lambda p: play(suite, task, p, calls))
    _, again, _ = in_bwrap(lambda p: play(suite, task, p, calls))
    assert answers[0] == "/testbed\n[exit code 3]"
    assert answers[1] == "[no output]"
    assert "<object object at 0x0>" in answers[2]
    assert answers[3].endswith("kept")
    assert answers == again  # hash seed and addresses included


def test_what_view_shows_matches_the_file(tmp_path):
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    line = "    X = '<f at 0x7f3a2b1c4d50> 1 passed in 0.12s /tmp/tmpab12_x3q'  "
    calls = [
        bash(f'printf "%s\\n" "def f():" "{line}" > odd.py'),
        ToolCall(
            name="str_replace_editor",
            arguments={"command": "view", "path": "odd.py", "view_range": "[2, 2]"},
        ),
    ]
    _, answers, _ = in_bwrap(lambda p: play(suite, task, p, calls))
    assert answers[1] == f"2\t{line}"


def test_new_deleted_and_binary_files_are_in_the_submission(tmp_path):
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    command = (
        "printf 'a\\0b' > blob; printf '\\351t\\351\\n' > latin; rm README.md; "
        "git config user.name x; git commit -qam mine; git config diff.noprefix true"
    )

    async def work(provider):
        _, _, diff = await play(suite, task, provider, [bash(command)])
        score = await suite.reward(task, diff, provider)
        return diff, score

    diff, score = in_bwrap(work)
    assert "GIT binary patch" in diff and "deleted file mode" in diff
    assert diff.encode("utf-8", "surrogateescape").count(b"\xe9t\xe9") == 1
    assert score.verdict == "unresolved"  # it applied, though it repairs nothing


def test_the_hidden_tests_are_nowhere_in_the_agents_sandbox(tmp_path):
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    row = task_row(task)
    secrets = {path.rpartition("/")[2] for path in hidden_files(row)}
    secrets |= {name.partition("::")[2] for name in (*row.fail_to_pass,)}
    pattern = "|".join(sorted(secrets))
    search = bash(
        f"grep -rIlE '{pattern}' / --exclude-dir=proc --exclude-dir=sys 2>/dev/null; "
        f"find / -xdev 2>/dev/null | grep -E '{pattern}'; "
        f"git log -p --all | grep -E '{pattern}'; git fsck --unreachable; "
        "for o in $(git rev-list --all --objects | cut -d' ' -f1); do git cat-file -p $o; done"
        f" | grep -aE '{pattern}'; env | grep -E '{pattern}'; echo searched"
    )
    _, (answer,), _ = in_bwrap(lambda p: play(suite, task, p, [search]))
    assert answer == "searched"


def test_the_full_style_shows_the_problem_statement(tmp_path):
    suite = make_suite(tmp_path, style="full")
    task = suite.tasks("train")[0]
    row = task_row(task)
    first, answers, diff = in_bwrap(
        lambda p: play(suite, task, p, [edit(task), bash(row.test_cmd)])
    )
    assert row.problem_statement.strip() in first and row.test_cmd in first
    assert answers[0] == "ok"
    assert answers[1].endswith("0 failed")
    assert task.payload["fixed_line"] in diff


def test_submit_ends_the_turn_at_once(tmp_path):
    suite = make_suite(tmp_path, image="none")
    task = suite.tasks("train")[0]
    provider = FakeProvider(lambda command, files: ExecResult(returncode=0, output="hi"))

    async def run():
        environment = suite.environment(task, provider)
        await environment.reset()
        calls = [bash("a"), ToolCall(name="submit", arguments={}), bash("b")]
        result = await environment.step(calls)
        await environment.close()
        await environment.close()
        return result

    result = asyncio.run(run())
    assert result.done and result.reason == "submit"
    assert [message.content for message in result.messages] == ["hi"]
    assert provider.live == 0 and len(provider.created[0].commands) == 1


@pytest.mark.parametrize(
    ("ending", "answer"),
    [
        ({"timed_out": True}, "part\n[stopped after 20 s]"),
        ({"oom_killed": True}, "part\n[out of memory]"),
    ],
)
def test_a_stopped_command_says_so(tmp_path, ending, answer):
    suite = make_suite(tmp_path, image="none")
    provider = FakeProvider(lambda c, f: ExecResult(returncode=0, output="part\n", **ending))
    task = suite.tasks("train")[0]
    _, answers, _ = asyncio.run(play(suite, task, provider, [bash("x")]))
    assert answers == [answer]


def test_tasks_carry_what_the_script_and_the_viewer_need(tmp_path):
    suite = make_suite(tmp_path, image="none", train=rows(3))
    for task in suite.tasks("train"):
        assert {"path", "buggy_line", "fixed_line", "mutation", "template", "sft"} <= set(
            task.payload
        )
        assert json.loads(json.dumps(task_row(task).to_json()))["instance_id"] == task.task_id
