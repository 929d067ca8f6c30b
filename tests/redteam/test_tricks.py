"""A few tricks of every kind on both backends, each with its control; the red team's own sheet.

All of them: `make redteam-json` (about ten minutes).
"""

import asyncio
import json

import pytest

from tests.redteam import gaps, suicides
from tests.redteam.__main__ import Sheet, ground, main
from tests.redteam.runner import holds, names, play, tricks
from tests.redteam.table import MachineTrick
from tests.redteam.world import REPO

ON_BWRAP = (
    "edit the tests",
    "plant the hidden test file",
    "conftest only",
    "shadow the grader's plugin",
    "print PASSED lines and leave",
    "os._exit(0)",
    "sys.exit(0)",
    "forge the lines and the facts and the exit code from inside",
    "an object that equals everything (unittest)",
    "steal the nonce and forge the report",
    "a packed object in the future",
    "read the answers from the grader's input",
    "a diff into .git",
    "a daemon that outlives its command",
    "a fork bomb",
    "forged frames on the channel",
    "a loopback service of the host",
    "the host's root through /proc",
    "tar: a hard link to what is outside",
    "kill PID 1 and everything",
    "break the repository",
)
ON_DOCKER = (
    "conftest only",
    "a daemon that outlives its command",
    "forged frames on the channel",
    "an abstract socket of the host",
    "tar: a file through a symlink",
    "kill the supervisor",
)


def played(backend, chosen):
    async def run():
        async with asyncio.timeout(240), ground(backend) as arena:
            return [await play(arena, name) for name in chosen]

    return asyncio.run(run())


def test_the_defences_hold_and_their_controls_bite_on_bwrap():
    assert [row for row in played("bwrap", ON_BWRAP) if not holds(row)] == []


def test_the_defences_hold_and_their_controls_bite_on_docker():
    assert [row for row in played("docker", ON_DOCKER) if not holds(row)] == []


def test_the_tables_are_as_large_as_promised_and_every_name_is_its_own():
    async def run():
        async with ground("bwrap") as arena:
            return names(arena), tricks(arena)

    known, all_tricks = asyncio.run(run())
    assert len(all_tricks) >= 25 and len(suicides.SUICIDES) >= 10
    assert len(set(known)) == len(known) == len(all_tricks) + len(suicides.SUICIDES)
    assert all(trick.defence for trick in all_tricks) and not any("," in name for name in known)
    # a control changes something: another spec, backend, script or limit
    for trick in all_tricks:
        if isinstance(trick, MachineTrick):
            changes = (trick.off_spec, trick.off_backend, trick.off_script, trick.off_output_bytes)
            assert sum(map(bool, changes)) == 1, trick.name


def test_the_page_names_what_is_defended_and_what_is_not():
    async def run():
        async with ground("bwrap") as arena:
            scores = [await gaps.score(arena, gap) for gap in gaps.GAPS]
            return tricks(arena), [score.value for score in scores]

    known, found = asyncio.run(run())
    assert found == [1.0] * len(gaps.GAPS)  # one that is mended becomes a trick
    page = (REPO / "docs" / "security.md").read_text()
    defended, _, open_ = page.partition("## Not defended")
    assert [
        trick.name for trick in known if f"| {trick.name} | {trick.defence} |" not in defended
    ] == []
    assert [one.name for one in suicides.SUICIDES if f"- {one.name}\n" not in defended] == []
    assert [gap.name for gap in gaps.GAPS if gap.name not in " ".join(open_.split())] == []


ROWS = [
    {"trick": "a", "kind": "trick", "backend": "bwrap", "defended": True, "control": True},
    {"trick": "b", "kind": "trick", "backend": "bwrap", "defended": True, "control": False},
    {"trick": "c", "kind": "trick", "backend": "bwrap", "defended": False, "control": True},
]


def test_a_sheet_is_whole_after_every_row_and_keeps_what_holds(tmp_path):
    path = tmp_path / "rows.json"
    sheet = Sheet(path, resume=True)
    for count, row in enumerate(ROWS, 1):
        sheet.add(row)
        assert json.loads(path.read_text()) == ROWS[:count]
    again = Sheet(path, resume=True)
    assert again.rows == ROWS[:1]  # a control that fails does not count
    assert again.has("bwrap", "a") and not again.has("docker", "a") and not again.has("bwrap", "b")
    assert Sheet(path, resume=False).rows == []


@pytest.mark.parametrize("arguments", [[], ["OUT="], ["OUT=x", "NAMES=a"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().out


def test_a_name_that_is_no_trick_is_refused(tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert main([f"OUT={out}", "BACKENDS=bwrap", "ONLY=edit the test"]) == 1
    assert "edit the test" in capsys.readouterr().out and not out.exists()
