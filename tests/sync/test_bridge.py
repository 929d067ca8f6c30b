"""Learner params -> version folder -> HF folder -> server, proved by the probe."""

import asyncio
import dataclasses
import errno
import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from skyrl_jax.core.errors import GenerationError, WeightsError
from skyrl_jax.core.types import SamplingParams
from skyrl_jax.generation.sglang import SGLangGenerator
from skyrl_jax.learner.export import bit_sum
from skyrl_jax.models import decoder, hf
from skyrl_jax.sync.bridge import Bridge, host_bit_sum
from skyrl_jax.sync.publish import Publisher
from skyrl_jax.weights.store import FolderStore
from tests.engine import tiny
from tests.serve import running

PROBE = tuple(range(2, 34))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = running.save_model(folder / "m")
    with running.running(model, folder, "--wait_for_weights") as (base, _):
        yield base


@pytest.fixture(scope="module")
def weights():
    return [tiny.params(seed) for seed in range(3)]


def bridged(url, tmp_path, action, keep=5):
    async def inside():
        store = FolderStore(tmp_path / "w", keep=keep)
        with Publisher(tiny.CFG, store) as publisher:
            async with (
                asyncio.timeout(100),
                SGLangGenerator(url, gate_open=False) as client,
                Bridge(store, [client], tmp_path / "hf", hf_config={"eos_token_id": 1}) as bridge,
            ):
                return await action(store, publisher, client, bridge)

    return asyncio.run(inside())


def edit_manifest(version, change):
    path = version.path / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_version_reaches_the_server(url, tmp_path, weights):
    async def action(store, publisher, client, bridge):
        waiting = asyncio.create_task(
            client.generate(PROBE, SamplingParams(max_new_tokens=8, seed=1, temperature=0.6), "s")
        )
        await asyncio.sleep(0.1)
        assert not waiting.done(), "no rollout before the first version is acknowledged"
        seconds = await bridge.update(publisher.publish(weights[0], 1, PROBE))
        assert set(seconds) == {"export_s", "update_s"}
        assert bridge.acknowledged == 1
        first = await waiting
        assert (await client.model_info())["weight_version"] == "1"
        await bridge.update(publisher.publish(weights[1], 2, PROBE))
        return first, await client.generate(PROBE, SamplingParams(max_new_tokens=8, seed=1), "s")

    first, second = bridged(url, tmp_path, action)
    assert set(first.weight_versions) == {1}
    assert set(second.weight_versions) == {2}
    # the learner's forward from its own params gives the served log-probs, at temperature 0.6 too
    for done, params, temperature in ((first, weights[0], 0.6), (second, weights[1], 1.0)):
        ids = jnp.asarray([*PROBE, *done.token_ids])[None]
        count = ids.shape[1]
        hidden = decoder.hidden_fn(
            tiny.CFG, params, ids, jnp.arange(count)[None], jnp.ones_like(ids)
        )[0]
        logits = decoder.matmul(hidden, decoder.head(tiny.CFG, params)) / temperature
        rows = jax.nn.log_softmax(logits)[jnp.arange(count - 1), ids[0, 1:]]
        np.testing.assert_allclose(done.logprobs, rows[len(PROBE) - 1 :], atol=1e-5)


def test_params_survive_bit_for_bit(tmp_path, weights):
    store = FolderStore(tmp_path / "w")
    with Publisher(tiny.CFG, store) as publisher:
        version = publisher.publish(weights[0], 3, PROBE)
    exported = Bridge(store, [], tmp_path / "hf").export(version)
    cfg, back = hf.load_hf(exported.folder)
    assert dataclasses.replace(cfg, checkpoint="") == tiny.CFG
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), weights[0], back)
    manifest = store.manifest(version)
    leaf = np.asarray(weights[0]["layers"]["q"])
    assert manifest["leaves"]["layers.q"] == {
        "shape": list(leaf.shape),
        "dtype": "float32",
        "bit_sum": host_bit_sum(leaf),
    }
    assert len(manifest["probe"]["logprobs"]) == len(PROBE) - 1


def test_a_full_disk_at_the_export_is_said(tmp_path, weights, monkeypatch):
    store = FolderStore(tmp_path / "w")
    with Publisher(tiny.CFG, store) as publisher:
        version = publisher.publish(weights[0], 3, PROBE)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf, "save_hf", full)
    with pytest.raises(WeightsError, match=rf"version 3 .* under {tmp_path}/hf: .*No space left"):
        Bridge(store, [], tmp_path / "hf").export(version)


def test_bit_sum_by_hand():
    # bits of 1.0 are 0x3f800000; four of them are 0xfe000000, eight wrap to 0xfc000000
    assert host_bit_sum(np.ones(1, np.float32)) == 0x3F800000
    assert host_bit_sum(np.ones(4, np.float32)) == 0xFE000000
    assert host_bit_sum(np.ones(8, np.float32)) == 0xFC000000


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
def test_host_and_device_sums_agree_and_notice_one_bit(dtype):
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(dtype)
    assert host_bit_sum(x) == int(bit_sum(jnp.asarray(x)))
    flipped = x.copy()
    flipped.view(np.uint8).reshape(-1)[17] ^= 1
    assert host_bit_sum(flipped) != host_bit_sum(x)


def test_an_update_past_its_deadline_is_the_engines_failure(tmp_path, weights):
    store = FolderStore(tmp_path / "w")
    with Publisher(tiny.CFG, store) as publisher:
        version = publisher.publish(weights[0], 1, PROBE)

    class Stuck:
        base_url = "http://stuck"
        gate_is_open = True

        def close_gate(self):
            self.gate_is_open = False

        async def pause(self):
            await asyncio.sleep(60)

    async def inside():
        server = Stuck()
        async with Bridge(store, [server], tmp_path / "hf", deadline_s=3.0) as bridge:
            with pytest.raises(GenerationError, match="version 1 was not .* within 3 s") as caught:
                await bridge.update(version)
            assert caught.value.cause == "engine_update"
            assert not server.gate_is_open and bridge.acknowledged is None

    asyncio.run(inside())


def test_bfloat16_is_cast_on_device(tmp_path, weights):
    store = FolderStore(tmp_path / "w")
    with Publisher(tiny.CFG, store, dtype="bfloat16") as publisher:
        version = publisher.publish(weights[0], 3, PROBE)
    exported = Bridge(store, [], tmp_path / "hf").export(version)
    _, back = hf.load_hf(exported.folder)
    wanted = weights[0]["layers"]["q"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(wanted), back["layers"]["q"])


def test_a_failed_probe_rolls_back_and_keeps_the_gate_shut(url, tmp_path, weights):
    async def action(store, publisher, client, bridge):
        await bridge.update(publisher.publish(weights[0], 1, PROBE))
        before = await client.prompt_logprobs(PROBE)
        bad = publisher.publish(weights[1], 2, PROBE)
        edit_manifest(bad, lambda m: m["probe"]["logprobs"].__setitem__(0, -0.5))
        with pytest.raises(GenerationError, match="version 1 is back") as caught:
            await bridge.update(bad)
        assert caught.value.cause == "engine_probe"
        assert not client.gate_is_open
        assert bridge.acknowledged == 1
        assert (await client.model_info())["weight_version"] == "1"
        assert await client.prompt_logprobs(PROBE) == before

    bridged(url, tmp_path, action)


def test_a_probe_that_is_nan_fails(url, tmp_path, weights):
    async def action(store, publisher, client, bridge):
        bad = publisher.publish(weights[0], 1, PROBE)
        edit_manifest(bad, lambda m: m["probe"]["logprobs"].__setitem__(0, float("nan")))
        with pytest.raises(GenerationError, match="no earlier version"):
            await bridge.update(bad)
        assert not client.gate_is_open

    bridged(url, tmp_path, action)


@pytest.mark.parametrize("field", ["bit_sum", "shape", "dtype"])
def test_params_that_are_not_what_was_published_stop_before_the_server(
    url, tmp_path, weights, field
):
    async def action(store, publisher, client, bridge):
        await bridge.update(publisher.publish(weights[0], 1, PROBE))
        bad = publisher.publish(weights[1], 2, PROBE)
        edit_manifest(bad, lambda m: m["leaves"]["layers.q"].__setitem__(field, 5))
        with pytest.raises(WeightsError, match="leaf layers.q is"):
            await bridge.update(bad)
        assert client.gate_is_open, "nothing happened to the server"
        assert (await client.model_info())["weight_version"] == "1"

    bridged(url, tmp_path, action)


def test_an_echo_of_another_version_is_an_error(url, tmp_path, weights, monkeypatch):
    async def action(store, publisher, client, bridge):
        async def wrong_echo():
            return {"weight_version": "77"}

        monkeypatch.setattr(client, "model_info", wrong_echo)
        with pytest.raises(GenerationError, match="echoes weight version '77'"):
            await bridge.update(publisher.publish(weights[0], 1, PROBE))
        assert not client.gate_is_open

    bridged(url, tmp_path, action)
    # leave the server usable for the next test
    running.post(f"{url}/continue_generation", {})


def test_requests_in_flight_are_aborted_and_the_next_use_the_new_version(url, tmp_path, weights):
    async def action(store, publisher, client, bridge):
        await bridge.update(publisher.publish(weights[0], 1, PROBE))
        sampling = SamplingParams(max_new_tokens=120, seed=1)
        jobs = [asyncio.create_task(client.generate((3 + i,), sampling, "s")) for i in range(30)]
        await asyncio.sleep(0.05)
        await bridge.update(publisher.publish(weights[1], 2, PROBE))
        done = await asyncio.gather(*jobs)
        assert all(len(set(one.weight_versions)) <= 1 for one in done)
        after = await client.generate((3,), SamplingParams(max_new_tokens=4, seed=1), "s")
        assert set(after.weight_versions) == {2}

    bridged(url, tmp_path, action)


def test_exports_do_not_pile_up(url, tmp_path, weights):
    async def action(store, publisher, client, bridge):
        for number in range(1, 5):
            await bridge.update(publisher.publish(weights[0], number, PROBE))

    bridged(url, tmp_path, action)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["v000003", "v000004"]


def test_publish_and_update_are_cheap(url, tmp_path, weights):
    """A bound far above the 0.1 CPU s measured for 0.5M params, to notice a leap."""

    async def action(store, publisher, client, bridge):
        await bridge.update(publisher.publish(weights[0], 1, PROBE))
        start = time.process_time()
        await bridge.update(publisher.publish(weights[1], 2, PROBE))
        return time.process_time() - start

    assert bridged(url, tmp_path, action) < 0.5


def test_the_launcher_carries_the_newest_version_once(url, tmp_path, weights):
    store = FolderStore(tmp_path / "w")
    with Publisher(tiny.CFG, store) as publisher:
        publisher.publish(weights[0], 1, PROBE)
        publisher.publish(weights[2], 2, PROBE)
    argv = [
        sys.executable,
        str(running.ROOT / "launchers" / "bridge.py"),
        f"--store={tmp_path / 'w'}",
        f"--server={url}",
        f"--scratch={tmp_path / 'hf'}",
        "--once",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("version 2 is served (")
