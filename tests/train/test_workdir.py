"""The run folder: one owner, one configuration."""

import dataclasses

import pytest

from configs.swe import get_config
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.train.loop import read_clock, refuse_lost_checkpoints
from skyrl_jax.train.warmstart import read_opening_shapes
from skyrl_jax.train.workdir import Workdir, read_json, write_json


def _config(lr: float = 3e-4, steps: int = 5):
    config = parse_config(get_config("quickstart").to_dict())
    learner = dataclasses.replace(config.learner, lr=lr)
    train = dataclasses.replace(config.train, steps=steps)
    return dataclasses.replace(config, learner=learner, train=train)


def test_second_process_is_refused_while_the_first_lives(tmp_path):
    with Workdir(tmp_path / "run", _config()):
        with pytest.raises(ConfigError, match="in use"), Workdir(tmp_path / "run", _config()):
            pass
    with Workdir(tmp_path / "run", _config()):
        pass


def test_changed_config_is_refused_with_the_difference_and_allowed_by_name(tmp_path, capsys):
    with Workdir(tmp_path, _config()) as workdir:
        workdir.pin()
    with pytest.raises(ConfigError, match=r"learner\.lr: 0\.0003 -> 0\.1"):
        with Workdir(tmp_path, _config(lr=0.1)):
            pass
    with Workdir(tmp_path, _config(lr=0.1), allow_change=["learner.lr"]):
        pass  # the run could not begin with it: the folder still belongs to the old value
    with Workdir(tmp_path, _config()):
        pass
    with Workdir(tmp_path, _config(lr=0.1), allow_change=["learner.lr"]) as workdir:
        workdir.commit()
    assert "learner.lr" in (tmp_path / "changes.log").read_text()
    assert "allowed change" in capsys.readouterr().out
    with Workdir(tmp_path, _config(lr=0.1)):
        pass


def test_more_steps_is_no_change_of_the_computation(tmp_path):
    with Workdir(tmp_path, _config(steps=5)) as workdir:
        workdir.pin()
    with Workdir(tmp_path, _config(steps=9)):
        pass


def test_json_is_replaced_whole(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": 2})
    assert read_json(tmp_path / "a.json") == {"x": 2}
    assert read_json(tmp_path / "b.json") is None
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_damaged_config_and_a_folder_that_cannot_be_are_named(tmp_path):
    with Workdir(tmp_path / "run", _config()):
        pass
    for text in ('{"bad', "[]"):
        (tmp_path / "run" / "config.json").write_text(text)
        with pytest.raises(DataError, match="config.json is damaged"):
            Workdir(tmp_path / "run", _config()).__enter__()
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(ConfigError, match="--workdir=.*cannot be used"):
            Workdir(root, _config()).__enter__()


def test_a_start_that_failed_leaves_the_folder_to_another_configuration(tmp_path):
    with Workdir(tmp_path / "run", _config()):
        # e.g. the server did not start; the next one must not play the tasks of this
        (tmp_path / "run" / "tasks.json").write_text("[]")
    with Workdir(tmp_path / "run", _config(lr=0.1)) as workdir:
        assert not (tmp_path / "run" / "tasks.json").exists()
        workdir.pin()
    with pytest.raises(ConfigError, match="differs"), Workdir(tmp_path / "run", _config()):
        pass


def test_a_folder_of_somebodys_files_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.tex"), Workdir(tmp_path, _config()):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_allowed_change_of_no_key_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"learner\.lr"):
        with Workdir(tmp_path, _config(), allow_change=["learner.lrr"]):
            pass


def test_a_run_that_lost_its_config_is_refused(tmp_path):
    with Workdir(tmp_path / "run", _config()) as workdir:
        workdir.pin()
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(ConfigError, match="bring its config"), Workdir(tmp_path / "run", _config()):
        pass


def test_the_tasks_of_a_run_cannot_be_changed(tmp_path):
    with pytest.raises(ConfigError, match="made once"):
        with Workdir(tmp_path, _config(), allow_change=["tasks.train"]):
            pass


@pytest.mark.parametrize(
    "clock",
    ['{"wall_s": 1e999, "seconds": {}}', '{"wall_s": -1, "seconds": {}}', "[]", '{"wall_s": 1}',
     '{"wall_s": 1, "seconds": {"open": "x"}}', '{"wall_s": 1' + "0" * 400 + ', "seconds": {}}'],
)  # fmt: skip
def test_a_damaged_clock_starts_from_nothing(tmp_path, clock):
    (tmp_path / "clock.json").write_text(clock)
    assert read_clock(tmp_path) == {"wall_s": 0.0, "seconds": {}}


def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(tmp_path):
    refuse_lost_checkpoints(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"2 steps in metrics\.jsonl"):
        refuse_lost_checkpoints(tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("content", [None, "[[1]]", "7", '{"a'])
def test_the_shapes_of_the_warm_start_are_there_or_named(tmp_path, content):
    sft = _config().sft
    if content is not None:
        write_json(tmp_path / "eval" / "opening_shapes.json", [])
        (tmp_path / "eval" / "opening_shapes.json").write_text(content)
    with pytest.raises(DataError, match="opening_shapes"):
        read_opening_shapes(tmp_path, sft)
    assert read_opening_shapes(tmp_path, dataclasses.replace(sft, max_steps=0)) == []
    write_json(tmp_path / "eval" / "opening_shapes.json", ["a"])
    assert read_opening_shapes(tmp_path, sft) == ["a"]
