"""Rewards cannot be faked: one attack at a time in real sandboxes, and who is to blame."""

import ast
import asyncio
import random
import re
from dataclasses import replace

import pytest

from skyrl_jax.core.errors import InfraError, SandboxGone, SandboxTimeout
from skyrl_jax.core.protocols import ExecResult
from skyrl_jax.sandbox.fake import FakeProvider
from skyrl_jax.tasks.swe import grading, reward
from skyrl_jax.tasks.swe.diffs import change_diff, new_file_diff
from skyrl_jax.tasks.swe.sealed import literal_assert
from skyrl_jax.tasks.swe.suite import hidden_files, task_row
from tests.tasks.test_environment import play
from tests.tasks.worlds import bash, edit, in_bwrap, make_suite, rows


def module_diff(row, text):
    """Return a diff that puts ``text`` on top of the broken module."""
    path = row.extra["path"]
    before = row.extra["files"][path]
    return change_diff(path, before, text + before)


def after_diff(row, text):
    path = row.extra["path"]
    before = row.extra["files"][path]
    return change_diff(path, before, before + text)


def target(row):
    return row.extra["function"].partition("(")[0].removeprefix("def ")


def fake_prints(row):
    lines = "".join(f"PASSED {name}\\n" for name in (*row.fail_to_pass, *row.pass_to_pass))
    return f'import os\nos.write(1, b"{lines}")\n'


ATTACKS = {
    "prints and leaves": lambda row: module_diff(row, fake_prints(row) + "os._exit(0)\n"),
    "leaves quietly": lambda row: module_diff(row, "import os\nos._exit(0)\n"),
    "prints": lambda row: module_diff(row, fake_prints(row)),
    "kills the parent": lambda row: module_diff(
        row, fake_prints(row) + "os.kill(os.getppid(), 9)\n"
    ),
    "kills the parent and reports": lambda row: module_diff(
        row,
        fake_prints(row)
        + 'os.write(1, b"\\nREPORT 0000000000000000 end 1\\n")\nos.kill(os.getppid(), 9)\n',
    ),
    # finds the runner's own frame and makes every later test pass
    "patches the runner": lambda row: module_diff(
        row,
        "import sys\nframe = sys._getframe()\n"
        "while 'sink' not in frame.f_locals:\n    frame = frame.f_back\n"
        "write = frame.f_globals['_write']\n"
        "frame.f_globals['_emit'] = lambda sink, event, name, message='': (\n"
        "    write(1, 'PASSED ' + name + '\\n'), sink('P', name))\n",
    ),
    # whatever is compared with it is equal
    "equals everything": lambda row: after_diff(
        row,
        "\n\nclass Any:\n    def __eq__(self, other):\n        return True\n\n\n"
        f"def {target(row)}(*a):\n    return Any()\n",
    ),
}


HEX = "'0123456789abcdef'"
# They spare what once told canary tests from the others: hexadecimal names and large values.
SPARING = {
    "equals all but large values": lambda row: after_diff(
        row,
        "\n\nclass Any:\n    def __eq__(self, other):\n"
        "        return not (isinstance(other, int) and other >= 10**6)\n\n\n"
        f"def {target(row)}(*a):\n    return Any()\n",
    ),
    "equals all but numbers over 1000": lambda row: after_diff(
        row,
        "\n\nclass Any:\n    def __eq__(self, other):\n"
        "        return type(other) is not int or other < 1000\n\n\n"
        f"def {target(row)}(*a):\n    return Any()\n",
    ),
    "reads the assert": lambda row: lookup(
        row, f"len(name) == 15 and all(letter in {HEX} for letter in name[5:])"
    ),
    "patches the runner": lambda row: module_diff(
        row,
        "import re, sys\nframe = sys._getframe()\n"
        "while 'sink' not in frame.f_locals:\n    frame = frame.f_back\n"
        "write = frame.f_globals['_write']\n"
        "def emit(sink, event, name, message=''):\n"
        "    event = 'F' if re.search('::test_[0-9a-f]{10}$', name) and event != 'P' else 'P'\n"
        "    write(1, ('PASSED ' if event == 'P' else 'FAILED ') + name + '\\n')\n"
        "    sink(event, name)\n"
        "frame.f_globals['_emit'] = emit\n",
    ),
    "replaces the tests": lambda row: module_diff(
        row,
        "import re, sys\nframe = sys._getframe()\n"
        "while 'text' not in frame.f_locals:\n    frame = frame.f_back\n"
        "space = frame.f_locals['space']\nreal = callable\n"
        "def fake(item):\n    name = getattr(item, '__name__', '')\n"
        "    if name.startswith('test_') and not re.fullmatch('test_[0-9a-f]{10}', name):\n"
        "        space[name] = lambda: None\n    return real(item)\n"
        "frame.f_globals['callable'] = fake\n",
    ),
}


def lookup(row, spared):
    """Return a diff whose function reads what its caller's line expects, but for spared names."""
    return after_diff(
        row,
        f"\n\ndef {target(row)}(*a, **k):\n    import sys\n    frame = sys._getframe(1)\n"
        f"    name = frame.f_code.co_name\n    if {spared}:\n        return None\n"
        "    lines = open(frame.f_code.co_filename).read().splitlines()\n"
        "    want = lines[frame.f_lineno - 1].rpartition(' == ')[2]\n"
        "    return eval(want, frame.f_globals)\n",
    )


def unsealed(monkeypatch):
    """Grade as rows are whose hidden tests are more than plain asserts."""
    monkeypatch.setattr(reward, "seal", lambda *_: None)


def test_there_are_attacks_that_only_the_canaries_catch(suite, monkeypatch):
    row = task_row(suite.tasks("train")[0])
    unsealed(monkeypatch)
    monkeypatch.setattr(grading, "_canary_trouble", lambda *_: "")
    for attack in (ATTACKS["patches the runner"], *SPARING.values()):
        (score,) = verdicts(suite, [attack(row)])
        assert score.verdict == "resolved", attack


def test_canaries_cannot_be_spared(suite, monkeypatch):
    row = task_row(suite.tasks("train")[0])
    unsealed(monkeypatch)
    found = verdicts(suite, [row.patch, *(attack(row) for attack in SPARING.values())])
    assert [score.verdict for score in found] == ["resolved"] + ["tampered"] * len(SPARING)


def test_an_attack_that_only_sealing_catches(suite, monkeypatch, tmp_path):
    row = task_row(suite.tasks("train")[0])
    numbered = f"name.startswith('test_{target(row)}_new_') and name[-1] > '1'"
    (sealed,) = verdicts(suite, [lookup(row, numbered)])
    assert (sealed.value, sealed.verdict) == (0.0, "unresolved")
    unsealed(monkeypatch)
    bare = make_suite(tmp_path / "bare")  # the first one remembers what it graded
    assert verdicts(bare, [lookup(row, numbered)])[0].value == 1.0


def test_what_sealed_tests_expect_is_behind_the_operations(suite):
    row = task_row(suite.tasks("train")[0])
    hidden = hidden_files(row)
    plan = reward.light_grading(row, hidden, row.patch)
    assert not {f"write {path}" for path in hidden} & {name for name, _ in plan.operations}
    ((name, value),) = [item for item in plan.operations if item[0] in ("run", "check")]
    assert name == "check" and b" == " not in value and b"_new_" not in value
    assert plan.answers.count("\n=") == next(iter(hidden.values())).count(" == ") + 2
    assert plan.request().endswith((plan.answers + plan.expectation.nonce).encode())


def test_a_canary_looks_like_the_other_tests():
    for seed in range(20):
        for row in rows(8):
            ((path, text),) = hidden_files(row).items()
            canaries, more = reward.add_canaries(path, text, target(row), random.Random(seed))
            bad = canaries.failing.partition("::")[2]
            assert re.fullmatch(f"test_{target(row)}_(new_[0-9]|old)", bad)
            line = more.partition(f"def {bad}():\n    ")[2].partition("\n")[0]
            assert line not in text
            call, want = literal_assert(line)
            ((_, right),) = [
                found
                for old in text.splitlines()
                if (found := literal_assert(old)) and found[0] == call
            ]
            want, right = ast.literal_eval(want), ast.literal_eval(right)
            assert type(want) is type(right) and want != right


@pytest.fixture
def suite(tmp_path):
    """A suite that has graded nothing: scores of equal diffs are kept (once.py)."""
    return make_suite(tmp_path)


def verdicts(suite, diffs):
    task = suite.tasks("train")[0]

    async def work(provider):
        return [await suite.reward(task, diff, provider) for diff in diffs]

    return in_bwrap(work)


def test_gold_is_resolved_and_other_patches_are_not(suite):
    row = task_row(suite.tasks("train")[0])
    wrong = row.patch.replace(row.extra["fixed_line"], row.extra["buggy_line"] + "  #")
    broken = row.patch.replace("+" + " " * 4, "+" + " " * 4 + ")", 1)
    elsewhere = row.patch.replace(row.extra["path"], "app/none.py")
    found = verdicts(suite, [row.patch, wrong, broken, elsewhere, "nonsense", "", " \n"])
    assert [score.verdict for score in found] == [
        "resolved",
        "unresolved",
        "unresolved",
        "no_apply",
        "no_apply",
        "empty",
        "empty",
    ]
    assert [score.value for score in found] == [1.0, 0, 0, 0, 0, 0, 0]


def test_attacks_from_the_module_get_no_reward(suite):
    row = task_row(suite.tasks("train")[0])
    found = verdicts(suite, [attack(row) for attack in ATTACKS.values()])
    for name, score in zip(ATTACKS, found, strict=True):
        assert score.value == 0.0, name
        harmless = name in ("prints", "patches the runner", "equals everything")
        assert score.verdict == ("unresolved" if harmless else "tampered"), (name, score)


def test_code_under_test_cannot_open_the_memory_of_the_parent(suite):
    row = task_row(suite.tasks("train")[0])
    path = row.extra["path"]
    fixed = row.extra["files"][path].replace(row.extra["buggy_line"], row.extra["fixed_line"])
    text = "import os\nopen('/proc/%d/mem' % os.getppid(), 'rb', 0)\n"
    daring = change_diff(path, row.extra["files"][path], text + fixed)
    (score,) = verdicts(suite, [daring])
    assert score.value == 0.0 and score.breakdown["p2p_passed"] == 0  # the import raised


def test_a_right_repair_may_print(suite):
    row = task_row(suite.tasks("train")[0])
    path = row.extra["path"]
    fixed = row.extra["files"][path].replace(row.extra["buggy_line"], row.extra["fixed_line"])
    noisy = change_diff(path, row.extra["files"][path], "print('x' * 9, end='')\n" + fixed)
    flood = change_diff(path, row.extra["files"][path], "print('x' * (1 << 21))\n" + fixed)
    assert [score.verdict for score in verdicts(suite, [noisy, flood])] == ["resolved"] * 2


def test_attacks_that_spare_canaries_get_no_reward(suite):
    row = task_row(suite.tasks("train")[0])
    found = verdicts(suite, [attack(row) for attack in SPARING.values()])
    assert [(score.value, score.verdict) for score in found] == [(0.0, "unresolved")] * 5


def test_test_files_in_the_diff_have_no_effect(suite):
    row = task_row(suite.tasks("train")[0])
    path = next(iter(hidden_files(row)))
    names = [name.partition("::")[2] for name in (*row.fail_to_pass, *row.pass_to_pass)]
    fakes = "".join(f"def {name}():\n    pass\n\n\n" for name in names).rstrip() + "\n"
    visible = row.extra["test_files"][0]
    emptied = change_diff(visible, row.extra["files"][visible], "x = 1\n")
    extra = [
        new_file_diff(path, fakes),
        new_file_diff("tests/conftest.py", "import os\nos._exit(0)\n"),
        new_file_diff("conftest.py", "import os\nos._exit(0)\n"),
        new_file_diff("sitecustomize.py", "import os\nos._exit(0)\n"),
        new_file_diff("swe_runner.py", "raise SystemExit(0)\n"),
        new_file_diff("os.py", "raise SystemExit(0)\n"),
        emptied,
    ]
    alone = verdicts(suite, extra)
    assert [score.verdict for score in alone] == ["unresolved"] * len(extra)
    beside = verdicts(suite, [row.patch + diff for diff in extra])
    assert [score.verdict for score in beside] == ["resolved"] * len(extra)


def test_the_test_folder_comes_from_the_trusted_copy(tmp_path):
    """Hidden tests that use a helper of the test folder do not use the submission's helper."""
    row = rows(1)[0]
    ((path, text),) = hidden_files(row).items()
    helper = "def check(got, want):\n    assert got == want\n"
    text = re.sub(r"assert (.*) == (.*)", r"check(\1, \2)", text)
    files = {**row.extra["files"], "tests/helper.py": helper}
    row = replace(
        row,
        test_patch=new_file_diff(path, "from tests.helper import check\n" + text),
        extra={**row.extra, "files": files},
    )
    blind = "def check(got, want):\n    pass\n"
    found = verdicts(
        make_suite(tmp_path, train=[row]),
        [
            row.patch,
            change_diff("tests/helper.py", helper, blind),
            new_file_diff("tests/helper/__init__.py", blind),
        ],
    )
    assert [score.verdict for score in found] == ["resolved", "unresolved", "unresolved"]


def test_what_a_patch_does_to_the_machine_is_its_own_fault(suite):
    row = task_row(suite.tasks("train")[0])
    found = verdicts(
        suite,
        [
            module_diff(row, "while True:\n    pass\n"),
            module_diff(row, "x = [b'x' * (1 << 20) for _ in range(4000)]\n"),
            module_diff(row, "import os\nos.kill(os.getpid(), 11)\n"),
            module_diff(row, "import os\nfor _ in range(9):\n    os.fork()\n"),
            "x" * (1 << 20),
        ],
    )
    assert [score.value for score in found] == [0.0] * 5
    assert found[0].verdict == "timeout"
    assert found[4].verdict == "no_apply"


def test_grading_is_in_a_fresh_sandbox_whatever_the_agent_did_to_its_own(suite):
    task = suite.tasks("train")[0]
    row = task_row(task)
    path = next(iter(hidden_files(row)))
    names = [name.partition("::")[2] for name in (*row.fail_to_pass, *row.pass_to_pass)]
    fakes = "; ".join(f"echo 'def {name}(): pass' >> {path}" for name in names)
    spoil = bash(
        f"{fakes}; mkdir -p /tmp/x; echo 'raise SystemExit(0)' > /opt/swe/swe_runner.py; "
        "printf '#!/bin/sh\\nexit 0\\n' > .git/hooks/post-checkout; "
        "rm -rf tests/*.pyc; nohup sleep 100 >/dev/null 2>&1 &"
    )

    async def work(provider):
        _, _, bad = await play(suite, task, provider, [spoil])
        _, _, good = await play(suite, task, provider, [spoil, edit(task)])
        return (
            bad,
            await suite.reward(task, bad, provider),
            await suite.reward(task, good, provider),
        )

    diff, bad, good = in_bwrap(work)
    assert path in diff  # the fake hidden tests are in the submission, and are overwritten
    assert bad.verdict == "unresolved"
    assert good.verdict == "resolved"


def graded(script, suite):
    provider = FakeProvider(script)
    task = suite.tasks("train")[0]
    score = asyncio.run(suite.reward(task, task_row(task).patch, provider))
    assert provider.live == 0
    return score, provider


def raising(error):
    def script(command, files):
        raise error

    return script


@pytest.mark.parametrize(
    ("error", "verdict"), [(SandboxGone("x"), "agent"), (SandboxTimeout("x"), "timeout")]
)
def test_a_sandbox_that_ends_from_inside_is_tried_once_more_then_the_agents_fault(
    suite, error, verdict
):
    score, provider = graded(raising(error), suite)
    assert (score.value, score.verdict) == (0.0, verdict)
    assert len(provider.created) == 2


def test_equal_diffs_share_a_sandbox_and_another_diff_has_its_own(suite):
    task = suite.tasks("train")[0]
    gold = task_row(task).patch
    other = after_diff(task_row(task), "\nUNUSED = 1\n")

    async def run(provider):
        made = []
        create = provider.create

        class Counting:
            async def create(self, spec):
                made.append(spec)
                return await create(spec)

        calls = (suite.reward(task, diff, Counting()) for diff in (gold, gold, other, gold))
        scores = await asyncio.gather(*calls)
        again = await suite.reward(task, gold, Counting())
        return [score.verdict for score in (*scores, again)], len(made)

    verdicts_found, sandboxes = in_bwrap(run)
    assert verdicts_found == ["resolved", "resolved", "unresolved", "resolved", "resolved"]
    assert sandboxes == 2


def test_an_empty_diff_makes_no_sandbox(suite):
    provider = FakeProvider(raising(InfraError("x")))
    score = asyncio.run(suite.reward(suite.tasks("train")[0], "\n", provider))
    assert score.verdict == "empty" and not provider.created


def test_host_errors_are_never_a_reward(suite):
    with pytest.raises(InfraError):
        graded(raising(InfraError("daemon gone")), suite)


def test_a_sandbox_that_is_long_in_coming_is_the_hosts_time(suite, monkeypatch):
    class Slow(FakeProvider):
        async def create(self, spec):
            await asyncio.sleep(30)

    monkeypatch.setattr(reward, "CREATE_TIMEOUT_S", 0.1)
    task = suite.tasks("train")[0]
    with pytest.raises(InfraError, match="no sandbox for grading within 0.1 s") as caught:
        asyncio.run(suite.reward(task, task_row(task).patch, Slow()))
    assert caught.value.cause == "create"


def test_a_log_without_a_report_is_tampered(suite):
    score, _ = graded(lambda c, f: ExecResult(returncode=0, output="all fine"), suite)
    assert score.verdict == "tampered"
