"""Topologies, meshes and the compiler's words: what is understood and how a mistake is told."""

import dataclasses

import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.plan.child import require_libtpu
from skyrl_jax.plan.chips import ladder, parse_topology
from skyrl_jax.plan.hlo import Collective
from skyrl_jax.plan.job import Compiled, check_job, parse_mesh, resolve_mesh
from skyrl_jax.plan.memory import read_oom


@pytest.mark.parametrize(
    ("text", "chips", "devices"),
    [
        ("v5e:4x4", 16, 16),
        ("v5p:2x4x4", 32, 32),
        ("v4:2x2x1", 4, 4),
        ("tpu7x:2x2x1", 4, 8),  # two JAX devices per chip
        ("gpu:8xH100-80GB", 8, 8),
    ],
)
def test_topologies(text, chips, devices):
    topology = parse_topology(text)
    assert (topology.num_chips, topology.num_devices) == (chips, devices)
    assert topology.is_tpu == (not text.startswith("gpu"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("v5x:4x4", "known: v4:.*v5e:4x4.*v5p:.*v6e:.*tpu7x:.*gpu:8xA100"),
        ("v5e", "no shape; write e.g. v5e:4x4"),
        ("v5e:4x0", "no shape"),
        ("v5e:2x2x4", "2 dimensions; write e.g. v5e:4x4"),
        ("v5p:4x4", "3 dimensions; write e.g. v5p:2x4x4"),
        ("gpu:8xH100", "no GPU is called 'H100'; known: .*H100-80GB"),
        ("gpu:H100-80GB", "the number of GPUs, e.g. gpu:8xH100-80GB"),
    ],
)
def test_a_wrong_topology_is_told_with_a_right_one(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_topology(text)


def test_a_search_goes_through_one_kind_smallest_first():
    sizes = [topology.num_chips for topology in ladder("v5p")]
    assert sizes == sorted(sizes) and sizes[0] == 4 and len(set(sizes)) == len(sizes)
    assert [topology.text for topology in ladder("v5e:4x4")] == ["v5e:4x4"]
    assert next(ladder("gpu:H200-141GB")).text == "gpu:1xH200-141GB"
    assert [topology.text for topology in ladder("gpu:8xH200-141GB")] == ["gpu:8xH200-141GB"]
    with pytest.raises(ConfigError, match="unknown"):
        ladder("v9")


def test_mesh_text():
    assert parse_mesh("data=1,fsdp=-1,tensor=2") == {"data": 1, "fsdp": -1, "tensor": 2}
    assert parse_mesh("") == {}
    for text, told in (
        ("fdsp=2", "'fdsp'; known: data, fsdp, tensor, context"),
        ("fsdp=2,fsdp=4", "twice"),
        ("fsdp=two", "whole number, e.g. fsdp=4"),
        ("fsdp", "whole number"),
        ("fsdp=0", "positive"),
        ("fsdp=-2", "positive"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_mesh(text)


def test_a_mesh_covers_all_devices(make_plan):
    plan = make_plan("v5e:4x4", mesh={"fsdp": -1, "tensor": 2})
    sizes = resolve_mesh(plan.mesh, 16)
    assert (sizes["fsdp"], sizes["tensor"]) == (8, 2)
    for axes in ({"fsdp": 8}, {"fsdp": 32}, {"fsdp": -1, "tensor": 3}, {"fsdp": -1, "data": -1}):
        wrong = dataclasses.replace(plan.mesh, **({"tensor": 1} | axes))
        with pytest.raises(ConfigError, match="does not divide the 16 devices"):
            resolve_mesh(wrong, 16)


def test_rows_and_tokens_must_divide(make_plan):
    mesh = {"data": 2, "fsdp": 2, "context": 4}
    assert check_job(make_plan("v5e:4x4", rows=8, seq_len=64, mesh=mesh))["context"] == 4
    with pytest.raises(ConfigError, match="--rows=6: .* over 4 devices.*--rows=8"):
        check_job(make_plan("v5e:4x4", rows=6, seq_len=64, mesh=mesh))
    with pytest.raises(ConfigError, match="--seq_len=66: .*context = 4"):
        check_job(make_plan("v5e:4x4", rows=8, seq_len=66, mesh=mesh))


def test_a_job_keeps_what_is_not_said(make_plan):
    plan = make_plan("v5e:4x4", rows=0, seq_len=0, remat="", mesh={"tensor": 2})
    assert (plan.learner.micro_rows, plan.learner.row_length) == (2, 512)  # of the quick start
    assert plan.learner.remat == "none" and plan.mesh.tensor == 2 and plan.mesh.fsdp == -1


def test_the_compilers_words():
    new = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom:\nRan out of memory on HBM, the total memory "
        "required for HLO temporaries (20.19G) exceeds available HBM (15.75G). Try less."
    )
    found = read_oom(new)
    assert found.total == round(20.19 * 2**30) and found.available == round(15.75 * 2**30)
    assert found.words.startswith("Ran out of memory") and found.words.endswith("(15.75G)")
    old = read_oom("Ran out of memory in memory space hbm. Used 512.00M of 1.5G hbm. Exceeded")
    assert (old.total, old.available) == (512 * 2**20, 3 * 2**29)
    assert read_oom("Ran out of memory in memory space vmem. Used 17M of 16M vmem.") is None


def test_a_missing_compiler_is_told_with_what_to_install():
    require_libtpu(lambda name: object())
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[plan\]'"):
        require_libtpu(lambda name: None)


def test_adapters_are_refused(make_plan):
    plan = make_plan("v5e:2x2", rows=4)
    if hasattr(plan.learner, "lora_rank"):
        learner = dataclasses.replace(plan.learner, lora_rank=4)
        with pytest.raises(ConfigError, match="lora_rank = 4: .* use 0"):
            check_job(dataclasses.replace(plan, learner=learner))


def test_an_answer_survives_the_pipe():
    loops = (None, 36)
    answer = Compiled(
        fits=True, message="", mesh={"fsdp": 4}, devices_per_chip=1, params=1, optimizer=2,
        reference=3, arguments=4, temporaries=5, peak=6, hbm=7, seconds=0.5,
        collectives=(Collective(kind="all-gather", sent=8, loops=loops),),
    )  # fmt: skip
    assert Compiled.from_json(answer.to_json()) == answer
