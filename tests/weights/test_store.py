"""A version is visible only when whole."""

import errno
import json

import pytest

from skyrl_jax.core.errors import WeightsError
from skyrl_jax.weights.store import MARKER, FolderStore


def writer(text="weights"):
    def write(folder):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "a.bin").write_text(text)
        (folder / "b.bin").write_text("b")

    return write


def test_publish_and_latest(tmp_path):
    store = FolderStore(tmp_path / "w")
    assert store.latest() is None
    store.publish(1, writer(), {"fact": 7})
    version = store.publish(2, writer(), {})
    assert store.latest() == version
    assert version.path.name == "v000002"
    manifest = store.manifest(store.version(1))
    assert manifest["fact"] == 7
    assert manifest["version"] == 1
    assert sorted(manifest["files"]) == ["orbax/b.bin", "orbax/deep/a.bin"]


def test_a_writer_that_dies_leaves_nothing_visible(tmp_path):
    store = FolderStore(tmp_path)
    store.publish(1, writer(), {})

    def dies(folder):
        folder.mkdir()
        (folder / "half").write_text("h")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.publish(2, dies, {})
    assert store.latest().number == 1
    assert (tmp_path / "v000002").exists()
    assert [path.name for path in FolderStore(tmp_path).sweep()] == ["v000002"]
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]
    store.publish(2, writer(), {})
    assert store.latest().number == 2


def test_the_marker_comes_last(tmp_path):
    """When the parameters are written, and when the manifest is, no marker exists yet."""
    store = FolderStore(tmp_path)
    store.publish(3, writer("old"), {})

    def write(folder):
        assert store.latest() is None
        assert not (folder.parent / MARKER).exists()
        writer("new")(folder)

    store.publish(3, write, {})
    assert (tmp_path / "v000003" / "orbax" / "deep" / "a.bin").read_text() == "new"


def test_damage_is_found(tmp_path):
    store = FolderStore(tmp_path)
    version = store.publish(1, writer(), {})
    (version.path / "orbax" / "b.bin").write_text("B")
    with pytest.raises(WeightsError, match=r"version 1: orbax/b\.bin is not what was published"):
        store.manifest(version)
    (version.path / "orbax" / "b.bin").unlink()
    with pytest.raises(WeightsError, match=r"lacks its file orbax/b\.bin"):
        store.manifest(version)
    (version.path / "manifest.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot read"):
        store.manifest(version)


def test_old_versions_are_removed(tmp_path):
    store = FolderStore(tmp_path, keep=2)
    for number in range(5):
        store.publish(number, writer(), {})
    assert [version.number for version in store.versions()] == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_resumed_run_forgets_newer_versions(tmp_path):
    store = FolderStore(tmp_path, keep=5)
    for number in range(4):
        store.publish(number, writer(), {})
    assert store.discard_after(1) == [2, 3]
    assert store.latest().number == 1


def test_an_unknown_version_names_those_there_are(tmp_path):
    store = FolderStore(tmp_path)
    store.publish(4, writer(), {})
    with pytest.raises(WeightsError, match="no complete weight version 7; it has: 4"):
        store.version(7)


def test_other_names_are_left_alone(tmp_path):
    (tmp_path / "v12").mkdir()
    (tmp_path / "notes").mkdir()
    store = FolderStore(tmp_path)
    assert store.sweep() == []
    assert store.versions() == []


def test_keep_must_leave_something(tmp_path):
    with pytest.raises(WeightsError, match="at least 1"):
        FolderStore(tmp_path, keep=0)


def test_big_numbers_sort_by_value(tmp_path):
    store = FolderStore(tmp_path, keep=9)
    for number in (999999, 1000000):
        store.publish(number, writer(), {})
    assert store.latest().number == 1000000
    assert json.loads((store.latest().path / "manifest.json").read_text())["version"] == 1000000


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError(
            'RESOURCE_EXHAUSTED: Failed writing: "x" [OS error 28: No space left on device]'
        ),
    ],
)
def test_a_full_disk_is_said_and_complete_versions_stay(tmp_path, error):
    store = FolderStore(tmp_path / "w")

    def fails(folder):
        writer()(folder)
        raise error

    with pytest.raises(WeightsError, match="there is no complete one"):
        store.publish(1, fails, {})
    store.publish(1, writer(), {})
    text = rf"cannot write weight version 2: the disk under {tmp_path}/w is full; .* one is 1$"
    with pytest.raises(WeightsError, match=text):
        store.publish(2, fails, {})
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v000001"]
    store.manifest(store.publish(2, writer(), {}))


def test_another_failure_of_the_disk_is_quoted_and_a_bug_is_not_hidden(tmp_path):
    store = FolderStore(tmp_path)

    def raises(error):
        def write(folder):
            raise error

        return write

    with pytest.raises(WeightsError, match=r"version 1: \[Errno 5\] broken; there is no"):
        store.publish(1, raises(OSError(errno.EIO, "broken")), {})
    with pytest.raises(ValueError, match="a bug"):
        store.publish(1, raises(ValueError("a bug")), {})
