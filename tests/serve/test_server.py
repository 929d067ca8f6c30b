"""The HTTP contract on a real server process, judged by SGLang's response schema."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import requests

from tests.serve import running
from tests.serve.running import post


@pytest.fixture(scope="module")
def oracle(downloads):
    return running.oracle(downloads)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [running.save_model(folder / f"m{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    with running.running(models[0], tmp_path_factory.mktemp("serve")) as (base, _):
        yield base


def body(ids=(5, 6, 7), *, rid=None, **sampling):
    fields = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    made = {
        "input_ids": list(ids),
        "sampling_params": {**fields, **sampling},
        "return_logprob": True,
    }
    return made | ({"rid": rid} if rid else {})


def in_background(url, request):
    box = {}
    thread = threading.Thread(
        target=lambda: box.update(answer=post(f"{url}/generate", request)), daemon=True
    )
    thread.start()
    return thread, box


def state(url):
    return requests.get(f"{url}/server_info", timeout=10).json()["internal_states"][0]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_generate(url, oracle):
    answer = post(f"{url}/generate", body()).json()
    decoded = oracle.GenerateResponse.from_json_value(answer)
    meta = decoded.meta_info
    assert "text" not in answer
    assert len(decoded.output_ids) == meta.completion_tokens == 6
    assert [entry.token_id for entry in meta.output_token_logprobs] == decoded.output_ids
    assert meta.output_token_logprobs_length == 6
    assert isinstance(meta.finish_reason, oracle.FinishLength)
    assert meta.finish_reason.length == 6
    assert meta.prompt_tokens == 3
    assert [(s.version, s.start, s.end) for s in meta.weight_versions] == [("default", 0, 6)]
    assert meta.weight_version == "default"
    assert meta.input_token_logprobs == []
    again = post(f"{url}/generate", body()).json()
    assert (
        again["meta_info"]["output_token_logprobs"] == answer["meta_info"]["output_token_logprobs"]
    )


def test_without_logprobs(url):
    meta = post(f"{url}/generate", body() | {"return_logprob": False}).json()["meta_info"]
    assert "output_token_logprobs" not in meta


def test_stop_id_and_eos(url, oracle):
    ids = post(f"{url}/generate", body()).json()["output_ids"]
    answer = post(f"{url}/generate", body(stop_token_ids=[ids[2]])).json()
    finish = oracle.GenerateResponse.from_json_value(answer).meta_info.finish_reason
    assert finish == oracle.FinishStop(matched=ids[2])
    assert answer["output_ids"] == ids[: ids.index(ids[2]) + 1]


def test_prompt_logprobs_and_no_new_token(url):
    request = body(ids=range(2, 22), max_new_tokens=0) | {"logprob_start_len": 5}
    answer = post(f"{url}/generate", request).json()
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == list(range(7, 22))
    assert entries[0][0] is None
    assert all(entry[0] < 0 for entry in entries[1:])
    assert answer["output_ids"] == []


def test_batch(url, oracle):
    request = body() | {"input_ids": [[5, 6, 7], [8]], "rid": "b"}
    request["sampling_params"] = [
        request["sampling_params"],
        {"max_new_tokens": 2, "ignore_eos": True},
    ]
    answers = post(f"{url}/generate", request).json()
    assert [a["meta_info"]["id"] for a in answers] == ["b_0", "b_1"]
    assert answers[0]["output_ids"] == post(f"{url}/generate", body()).json()["output_ids"]
    assert len(answers[1]["output_ids"]) == 2


def test_echo_of_the_prompt(url):
    answer = post(f"{url}/generate", body() | {"return_prompt_token_ids": True}).json()
    assert answer["prompt_token_ids"] == [5, 6, 7]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input_ids": "x"}, "invalid type"),
        ({"sampling_params": {"zz": 1}}, "unknown field `zz`"),
        ({"sampling_params": {"top_p": 0.9}}, "sampling_params.top_p=0.9 is not supported"),
        ({"sampling_params": {"top_k": 5}}, "leave it at -1"),
        ({"sampling_params": {"regex": "a"}}, "regex"),
        ({"sampling_params": {"n": 2}}, "n=2"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        (
            {"sampling_params": {"max_new_tokens": 1, "stop_token_ids": [*range(10, 20)]}},
            "at most 8",
        ),
        (
            {"sampling_params": {"max_new_tokens": 1, "stop_token_ids": [-1]}},
            "stop_token_ids must lie in [0, 96)",
        ),
        (
            {"sampling_params": {"max_new_tokens": 1, "stop_token_ids": [3, 96]}},
            "stop_token_ids must lie in [0, 96)",
        ),
        (
            {"sampling_params": {"max_new_tokens": 1, "stop_token_ids": [1 << 40]}},
            "stop_token_ids must lie in",
        ),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [96]}, "[0, 96)"),
        ({"input_ids": [-1]}, "[0, 96)"),
        ({"input_ids": [3] * 128}, "longer than the context length"),
        ({"input_ids": [3] * 120}, "exceeds the context length of 128"),
        ({"stream": True}, "stream"),
        ({"text": "hello"}, "text"),
        ({"input_ids": [[3], [4]], "rid": ["a"]}, "1 entries for 2"),
        ({"logprob_start_len": 3}, "logprob_start_len"),
    ],
)
def test_what_cannot_be_served_is_400_with_a_reason(url, change, text):
    request = body(max_new_tokens=10) | change
    answer = post(f"{url}/generate", request)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert text in (error if isinstance(error, str) else error["message"])


def test_schema_violations_use_the_string_shape(url):
    assert isinstance(post(f"{url}/generate", {"input_ids": "x"}).json()["error"], str)
    assert post(f"{url}/generate", [1]).status_code == 400
    raw = requests.post(f"{url}/generate", data=b"{", timeout=10)
    assert raw.status_code == 400


def test_abort_of_a_running_and_of_a_queued_request(url, oracle):
    """8 slots: the ninth request waits. Abort by prefix ends both shapes."""
    jobs = [in_background(url, body(rid=f"run{i}", max_new_tokens=120)) for i in range(8)]
    jobs += [in_background(url, body(rid=f"queue{i}", max_new_tokens=120)) for i in range(80)]
    until(lambda: state(url)["pending"] > 10)
    assert post(f"{url}/abort_request", {"rid": "queue"}).status_code == 200
    assert post(f"{url}/abort_request", {"rid": "run"}).text == ""
    for thread, _ in jobs:
        thread.join(30)
    answers = [box["answer"].json() for _, box in jobs]
    for answer in answers:
        oracle.GenerateResponse.from_json_value(answer)
    aborted = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "abort"]
    queued = [a for a in aborted if "queue" in a["meta_info"]["finish_reason"]["message"]]
    assert queued
    assert all("prompt_tokens" not in a["meta_info"] and a["output_ids"] == [] for a in queued)


def test_an_unknown_rid_is_ignored(url):
    assert post(f"{url}/abort_request", {"rid": "nobody"}).status_code == 200
    assert post(f"{url}/abort_request", {"rid": ""}).status_code == 200
    assert post(f"{url}/abort_request", {"rid": 3}).status_code == 400


def test_a_rid_in_use_is_refused(url):
    request = body() | {"input_ids": [[5], [6]], "rid": ["same", "same"]}
    answer = post(f"{url}/generate", request)
    assert answer.status_code == 400
    assert "'same' is already in use" in answer.json()["error"]["message"]
    assert state(url)["pending"] == 0


def test_pause_aborts_and_blocks_and_continue_releases(url):
    running_job, running_box = in_background(
        url, body(max_new_tokens=120) | {"input_ids": [[3]] * 400}
    )
    until(lambda: state(url)["pending"])
    paused = post(f"{url}/pause_generation", {"mode": "abort"})
    assert paused.json()["status"] == "ok"
    assert state(url)["pending"] == 0
    running_job.join(30)
    finish = [a["meta_info"]["finish_reason"]["type"] for a in running_box["answer"].json()]
    assert finish.count("abort") > 300
    thread, box = in_background(url, body())
    time.sleep(0.3)
    assert "answer" not in box, "/generate must block while the server is paused"
    assert post(f"{url}/flush_cache").status_code == 200
    assert post(f"{url}/continue_generation", {}).json()["status"] == "ok"
    thread.join(30)
    assert box["answer"].status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract", "x", 3])
def test_other_pause_modes_are_refused(url, mode):
    answer = post(f"{url}/pause_generation", {"mode": mode})
    assert answer.status_code == 400
    assert "use 'abort'" in answer.json()["error"]["message"]
    assert state(url)["paused"] is False


def test_flush_is_400_while_busy(url):
    request = body(max_new_tokens=120) | {"input_ids": [[3]] * 400}
    thread, _ = in_background(url, request)
    until(lambda: state(url)["pending"])
    assert requests.get(f"{url}/flush_cache", timeout=10).status_code == 400
    assert post(f"{url}/abort_request", {"abort_all": True}).ok
    thread.join(30)
    assert requests.get(f"{url}/flush_cache", timeout=10).status_code == 200


def test_update_weights_and_its_failures(url, models, tmp_path):
    update = f"{url}/update_weights_from_disk"
    before = post(f"{url}/generate", body()).json()
    corrupt = running.save_model(tmp_path / "corrupt")
    (corrupt / "model.safetensors").write_bytes(b"\xff" * 100)
    nan = running.save_model(tmp_path / "nan", scale=float("nan"))
    listed = running.save_model(tmp_path / "listed")
    (listed / "config.json").write_text("[]")
    for path, text in (
        (corrupt, "cannot read"),
        (tmp_path / "absent", "config.json is missing"),
        (nan, "not finite"),
        (listed, "config.json must hold a JSON object, it holds a list"),
    ):
        answer = post(update, {"model_path": str(path), "weight_version": "9"})
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert text in answer.json()["message"]
        kept = post(f"{url}/generate", body()).json()
        assert kept["meta_info"]["weight_version"] == before["meta_info"]["weight_version"]
        assert kept["output_ids"] == before["output_ids"]
    good = post(update, {"model_path": str(models[1]), "weight_version": "4"})
    assert good.json() == {
        "success": True,
        "message": "Succeeded to update model weights.",
        "num_paused_requests": 0,
    }
    info = requests.get(f"{url}/model_info", timeout=10).json()
    assert (info["weight_version"], info["model_path"]) == ("4", str(models[1]))
    after = post(f"{url}/generate", body()).json()
    assert after["meta_info"]["weight_versions"] == [{"version": "4", "start": 0, "end": 6}]
    assert (
        after["meta_info"]["output_token_logprobs"] != before["meta_info"]["output_token_logprobs"]
    )
    assert post(update, {"model_path": 3}).status_code == 400
    assert post(update, {"model_path": str(models[0]), "weight_version": "default"}).ok


def test_status_endpoints(url, oracle, models):
    assert requests.get(f"{url}/health", timeout=10).status_code == 200
    assert requests.get(f"{url}/health_generate", timeout=30).status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = requests.get(url + path, timeout=10).json()
        oracle.GetModelInfoResponse.from_json_value(info)
        assert info["is_generation"] is True
    for path in ("/server_info", "/get_server_info"):
        info = requests.get(url + path, timeout=10).json()
        oracle.GetServerInfoResponse.from_json_value(info)
        assert info["max_context_length"] == 128
    assert requests.get(f"{url}/nothing", timeout=10).status_code == 404


def test_a_caller_that_leaves_frees_its_slot(url):
    with pytest.raises(requests.exceptions.ReadTimeout):
        many = body(max_new_tokens=120) | {"input_ids": [[3]] * 2000}
        requests.post(f"{url}/generate", json=many, timeout=0.1)
    until(lambda: state(url)["pending"] == 0)


def test_port_in_use_is_one_clear_line(models, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = running.launch(models[0], f"--port={port}", port_file=tmp_path / "port")
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = output.strip().splitlines()
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line


def test_wrong_model_folder_is_one_clear_line(tmp_path):
    process = running.launch(tmp_path / "absent", "--port=0", port_file=tmp_path / "port")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "cannot read" in output.strip().splitlines()[-1]


def test_sigterm_ends_it_cleanly_and_waiting_for_weights_serves_nothing(models, tmp_path):
    with running.running(models[0], tmp_path, "--wait_for_weights") as (base, process):
        assert process.stdout.readline().startswith(f"serving {models[0]} at {base}")
        assert requests.get(f"{base}/health", timeout=10).status_code == 200
        assert requests.get(f"{base}/model_info", timeout=10).json()["weight_version"] == "none"
        thread, box = in_background(base, body())
        time.sleep(0.3)
        assert "answer" not in box
        post(
            f"{base}/update_weights_from_disk",
            {"model_path": str(models[0]), "weight_version": "0"},
        )
        thread.join(30)
        assert box["answer"].json()["meta_info"]["weight_version"] == "0"
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


def test_the_parents_death_ends_it(models, tmp_path):
    """kill -9 of the process that started the server: the server is gone within 2 s."""
    script = (
        "import sys, subprocess, time; p = subprocess.Popen(sys.argv[1:]); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    port_file = tmp_path / "port"
    argv = [
        sys.executable, str(running.ROOT / "launchers" / "serve.py"), f"--model={models[0]}",
        "--port=0", f"--port_file={port_file}", *running.FLAGS,
    ]  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *argv],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(running.ROOT)},
    )
    try:
        child = int(parent.stdout.readline())
        until(port_file.exists, 200)
        parent.kill()
        parent.wait()
        until(lambda: not alive(child), 2.0)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_the_kernel_ends_it_even_when_its_loop_hangs():
    """Without the poll: a child that only sleeps dies with its parent by PR_SET_PDEATHSIG."""
    child = "from skyrl_jax.serve.process import die_with_parent as d; d(); print(1, flush=True); "
    script = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, child + "import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(running.ROOT)},
    )
    try:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "1\n"
        parent.kill()
        parent.wait()
        until(lambda: not alive(pid), 2.0)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
