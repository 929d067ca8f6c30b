"""Configuration: presets build, wrong keys are named with the nearest right one."""

import pytest

from configs.swe import get_config
from skyrl_jax.core.config import diff_config, flatten_config, known_keys, parse_config
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.validate import RANGES, validate_config

PRESETS = ("quickstart", "smollm2_135m", "qwen3_8b", "qwen3_14b", "qwen3_32b")


def _values(preset: str = "quickstart") -> dict:
    return get_config(preset).to_dict()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_and_validates(preset):
    config = validate_config(parse_config(_values(preset)))
    assert config.learner.row_length >= config.rollout.max_episode_tokens
    assert set(flatten_config(config)) == set(known_keys())


def test_the_seed_recipes_have_the_seed_numbers():
    eight = parse_config(_values("qwen3_8b"))
    assert (eight.rollout.tasks_per_step, eight.rollout.samples_per_task) == (32, 8)
    assert (eight.rollout.max_prompt_tokens, eight.rollout.max_new_tokens) == (31_232, 1536)
    assert (eight.learner.lr, eight.objective.kl_coef) == (1e-6, 0.001)
    big = parse_config(_values("qwen3_32b"))
    assert (big.objective.advantage, big.objective.normalize_std) == ("rloo", False)
    assert (big.objective.reduction_norm, big.learner.row_length) == (40_768.0, 40_960)


def test_no_preset_on_a_machine_without_accelerator_is_quickstart_and_says_so(capsys, tmp_path):
    import configs.swe as swe

    saved = swe._ACCELERATOR_NODES
    try:
        swe._ACCELERATOR_NODES = (str(tmp_path / "none*"),)
        assert swe.get_config().name == "swe-quickstart"
        assert "quickstart" in capsys.readouterr().out
        (tmp_path / "accel0").touch()
        swe._ACCELERATOR_NODES = (str(tmp_path / "accel*"),)
        assert swe.get_config().name == "swe-quickstart"  # the others cannot be trained yet
        assert "an accelerator was found" in capsys.readouterr().out
    finally:
        swe._ACCELERATOR_NODES = saved


def test_unknown_preset_is_named():
    with pytest.raises(ValueError, match="quickstart"):
        get_config("quikstart")


def test_unknown_key_names_the_path_and_the_nearest_key():
    values = _values()
    values["learner"]["learning_rate"] = 1.0
    with pytest.raises(ConfigError, match=r"'learner\.learning_rate'.*'learner\."):
        parse_config(values)


def test_missing_key_is_named_by_path():
    values = _values()
    del values["rollout"]["max_turns"]
    with pytest.raises(ConfigError, match=r"rollout\.max_turns"):
        parse_config(values)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("learner", "lr", "fast"), ("rollout", "max_turns", 2.5), ("eval", "greedy", 1)],
)
def test_wrong_type_is_named_by_path(section, key, value):
    values = _values()
    values[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        parse_config(values)


@pytest.mark.parametrize(
    ("section", "key", "value", "text"),
    [
        ("rollout", "top_p", 0.9, "top_p"),
        ("rollout", "temperature", 0.0, "temperature"),
        ("rollout", "samples_per_task", 1, "group statistics"),
        ("learner", "row_length", 64, "row_length"),
        ("engine", "max_context", 64, "max_context"),
        ("objective", "advantage", "gae2", "grpo, rloo"),
        ("sandbox", "backend", "vm", "bwrap"),
        ("sandbox", "backend", "remote", "'remote' needs the URLs of its hosts"),
        ("sandbox", "hosts", ("http://h:1",), "no other backend has any"),
        ("actor", "runtime", "slurm", "local, ray"),
        ("model", "num_kv_heads", 2, "multiple"),
        (
            "mesh",
            "tensor",
            3,
            r"mesh.tensor = 3 does not divide model.num_kv_heads = 1.*divisor of 1",
        ),
        ("mesh", "expert", 2, "mesh.expert = 2, but family .qwen3. has no experts"),
        ("learner", "updates_per_batch", 99, "tasks_per_step"),
        ("rollout", "create_timeout_s", 60.0, "must be below rollout.init_timeout_s = 60"),
        ("rollout", "grade_timeout_s", 30.0, "must be below rollout.grade_timeout_s = 30"),
        ("learner", "schedule", "cosine", "learner.decay_steps = 0.*after learner.warmup_steps"),
        ("learner", "schedule", "linear", "constant, cosine"),
        ("learner", "moment_dtype", "float16", "float32, bfloat16"),
        ("learner", "reference_dtype", "float16", "float32, bfloat16"),
        ("learner", "remat", "some", "none, full, attn_out, dots"),
        ("objective", "balance_coef", 0.1, "balance_coef.*model.num_experts is 0.*use 0"),
        ("objective", "on_policy", True, "learner.updates_per_batch = 1 .now 2"),
        ("objective", "abandoned", "keep", "drop, train"),
        ("rollout", "replay_routing", True, "num_experts = 0.*engine.servers = .*tells none"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(section, key, value, text):
    values = _values()
    values[section][key] = value
    with pytest.raises(ConfigError, match=text):
        validate_config(parse_config(values))


def test_sandbox_hosts_and_what_cannot_go_with_them():
    def checked(**changes):
        values = get_config("quickstart")
        changes = {"sandbox.backend": "remote", "sandbox.hosts": ("http://h:1",), **changes}
        values.update_from_flattened_dict(changes)
        return validate_config(parse_config(values.to_dict()))

    assert checked().sandbox.hosts == ("http://h:1",)
    for changes, text in (
        ({"actor.runtime": "ray"}, r"actor\.runtime = 'ray' starts sandbox hosts itself"),
        ({"agent.kind": "mini_swe_agent"}, r"agent\.kind = 'mini_swe_agent' shares a socket"),
        ({"sandbox.hosts": ("https://h:1",)}, "a sandbox host speaks no TLS"),
        ({"sandbox.hosts": ("http://h:1/path",)}, "no http:// address"),
        (
            {"sandbox.backend": "bwrap", "sandbox.hosts": (), "actor.runtime": "ray"}
            | {"agent.kind": "openhands"},
            r"actor\.runtime = 'ray'",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            checked(**changes)


def test_every_number_has_a_range_and_its_ends_are_held():
    flat = flatten_config(parse_config(_values()))
    numbers = {k for k, v in flat.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    assert numbers == set(RANGES)
    for path, (low, high) in RANGES.items():
        whole = isinstance(flat[path], int)
        outside = [low - 1 if whole else low - 1.0]
        if whole or high < float("inf"):
            outside.append(high + 1 if whole else high + 1.0)
        for value in outside:
            values = get_config("quickstart")
            values.update_from_flattened_dict({path: value})
            with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
                validate_config(parse_config(values.to_dict()))


def test_a_micro_batch_has_no_more_tokens_than_an_int32_numbers():
    values = _values()
    values["learner"]["micro_rows"] = 2**31 // values["learner"]["row_length"]
    text = r"learner\.micro_rows = 4194304 rows of learner\.row_length = 512 tokens are 2\.15e\+09"
    with pytest.raises(ConfigError, match=text):
        validate_config(parse_config(values))
    values["learner"]["micro_rows"] -= 1
    validate_config(parse_config(values))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused(value):
    values = _values()
    values["objective"]["entropy_coef"] = value
    with pytest.raises(ConfigError, match=r"objective\.entropy_coef.*finite"):
        parse_config(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../x"),
        ("engine.servers", ("not a url",)),
        ("engine.servers", ("ftp://x",)),
        ("objective.masked_reasons", ("submit",)),
        ("objective.zeroed_reasons", ("turn",)),
        ("objective.zeroed_reasons", ("turns:limit",)),
        ("objective.masked_reasons", ("agent:",)),
    ],
)
def test_names_and_addresses_of_the_wrong_form_are_refused(key, value):
    values = get_config("quickstart")
    values.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        validate_config(parse_config(values.to_dict()))


def test_diff_shows_both_values():
    a = flatten_config(parse_config(_values()))
    values = _values()
    values["learner"]["lr"] = 0.5
    assert diff_config(a, flatten_config(parse_config(values))) == {"learner.lr": (4.5e-5, 0.5)}
