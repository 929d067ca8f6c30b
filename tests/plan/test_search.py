"""The search: what it tries, in which order, and what it leaves out."""

import dataclasses

import pytest

from skyrl_jax.core.errors import SkyrlError
from skyrl_jax.plan.chips import GIB, ladder, parse_topology
from skyrl_jax.plan.job import Compiled
from skyrl_jax.plan.search import (
    MESHES_PER_TOPOLOGY,
    OutOfTime,
    candidate_meshes,
    floor_bytes,
    search,
)

BIG = dict(vocab_size=1024, hidden_size=64, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=16)


def answer(fits):
    return Compiled(
        fits=fits, message="", mesh={}, devices_per_chip=1, params=0, optimizer=0, reference=0,
        arguments=0, temporaries=0, peak=GIB, hbm=0, collectives=(), seconds=1.0,
    )  # fmt: skip


class Compiler:
    """Answers by a rule over jobs, and remembers what it was asked."""

    def __init__(self, rule):
        self.rule, self.asked, self.clock = rule, [], 0.0

    def __call__(self, job, seconds):
        self.asked.append((job.topology.text, job.learner.remat, job.mesh.tensor))
        self.clock += 60.0
        return answer(self.rule(job))


def run(job, kind, compiler, num_params=1000, **options):
    lines = []
    found = search(
        job, ladder(kind), num_params, compiler, tell=lines.append, clock=lambda: compiler.clock,
        **({"limit_s": 1e6} | options),
    )  # fmt: skip
    return found, lines


def test_floor_by_hand(make_plan):
    job = make_plan("v5e:2x2", rows=4, seq_len=64, mesh={"fsdp": 2, "tensor": 2}, **BIG)
    # 1600 parameters of 16 bytes on 4 devices; 256 / 4 tokens, 4 layers, width 64, 2 bytes.
    assert floor_bytes(job, 1600) == 6400 + 64 * 4 * 64 * 2
    kl = dataclasses.replace(job, objective=dataclasses.replace(job.objective, kl_coef=0.1))
    assert floor_bytes(kl, 1600) == floor_bytes(job, 1600) + 1600 * 4 / 4  # the frozen reference

    def width(remat, **learner):
        changed = dataclasses.replace(job.learner, remat=remat, **learner)
        return (floor_bytes(dataclasses.replace(job, learner=changed), 1600) - 6400) / (64 * 4 * 2)

    assert width("attn_out") == 64 + 8 * 16
    assert (
        width("dots") == width("none") == 64 + 8 * 16 + 2 * 4 * 16 + 2 * job.model.intermediate_size
    )
    assert width("full", compute_dtype="float32") == 2 * 64
    assert width("full", moment_dtype="bfloat16") == 64 - 1600 * 2 / 4 / (64 * 4 * 2)


def test_replicas_share_no_state(make_plan):
    alone = make_plan("v5e:2x2", rows=4, mesh={"fsdp": 1, "data": 4}, **BIG)
    context = make_plan("v5e:2x2", rows=4, mesh={"fsdp": 1, "context": 4}, **BIG)
    kept = 4 * 64 // 4 * 4 * 64 * 2
    assert floor_bytes(alone, 1600) == floor_bytes(context, 1600) == 1600 * 16 + kept


def test_candidates_divide_rows_heads_and_tokens(make_plan):
    job = make_plan("v5e:4x4", rows=4, seq_len=64, **BIG)
    meshes = list(candidate_meshes(job, parse_topology("v5e:4x4")))
    assert 0 < len(meshes) <= MESHES_PER_TOPOLOGY
    for mesh in meshes:
        assert mesh.data * mesh.fsdp * mesh.tensor * mesh.context == 16
        assert 4 % mesh.fsdp == 0 and 4 % mesh.tensor == 0 and 64 % (2 * mesh.context) == 0
    splits = [mesh.tensor * mesh.context for mesh in meshes]
    assert splits == sorted(splits) and splits[0] == 4  # fsdp takes all it can: the 4 rows
    assert (meshes[0].fsdp, meshes[0].tensor, meshes[0].context) == (4, 4, 1)


def test_the_smallest_topology_then_the_least_recomputation(make_plan):
    job = make_plan("v5e:2x2", rows=16, **BIG)

    def rule(job):
        return job.topology.num_chips >= 8 and job.learner.remat in ("attn_out", "full")

    compiler = Compiler(rule)
    found, lines = run(job, "v5e", compiler)
    assert found.job.topology.text == "v5e:2x4" and found.job.learner.remat == "attn_out"
    assert compiler.asked[0][:2] == ("v5e:1x1", "full")
    # On the topology that fits: full first, then the policies that compute less again.
    remats = [remat for text, remat, _ in compiler.asked if text == "v5e:2x4"]
    assert list(dict.fromkeys(remats)) == ["full", "none", "dots", "attn_out"]
    assert all(text in ("v5e:1x1", "v5e:2x2", "v5e:2x4") for text, *_ in compiler.asked)
    assert len(lines) == len(compiler.asked)
    assert "v5e:2x4" in lines[-1] and "remat=attn_out fits: 1.00 of 15.75 GiB" in lines[-1]


def test_a_mesh_that_fits_with_no_policy_is_not_tried_again(make_plan):
    job = make_plan("v5e:2x2", rows=16, **BIG)
    compiler = Compiler(lambda job: job.mesh.tensor == 2)
    found, _ = run(job, "v5e:2x2", compiler, policies=("none", "full"))
    assert found.job.mesh.tensor == 2 and found.job.learner.remat == "none"
    assert compiler.asked == [
        ("v5e:2x2", "full", 1), ("v5e:2x2", "full", 2), ("v5e:2x2", "none", 2),
    ]  # fmt: skip


def test_what_cannot_fit_is_not_compiled(make_plan):
    job = make_plan("v5e:2x2", rows=16, **BIG)
    compiler = Compiler(lambda job: True)
    # 16 bytes each: 16 GiB on 8 devices leave 14.9 GiB a device; on 4 they would need 29.8.
    found, lines = run(job, "v5e", compiler, num_params=8 * 10**9)
    assert found.job.topology.text == "v5e:2x4"
    assert {text for text, *_ in compiler.asked} == {"v5e:2x4"}
    assert any(
        "v5e:2x2" in line and "not tried: needs at least 29.8 of 15.8" in line for line in lines
    )
    assert run(job, "v5e:2x2", compiler, num_params=8 * 10**9)[0] is None


def test_a_refused_try_does_not_end_the_search(make_plan):
    job = make_plan("v5e:2x2", rows=16, **BIG)

    def rule(job):
        if job.mesh.tensor == 1:
            raise SkyrlError("no such mesh")
        return True

    found, lines = run(job, "v5e:2x2", Compiler(rule), policies=("full",))
    assert found.job.mesh.tensor == 2 and any("refused: no such mesh" in line for line in lines)


def test_the_time_limit_keeps_what_was_found(make_plan):
    job = make_plan("v5e:2x2", rows=16, **BIG)
    compiler = Compiler(lambda job: job.learner.remat == "full")
    found, lines = run(job, "v5e:2x2", compiler, limit_s=100.0)  # two compiles of 60 s
    assert found.job.learner.remat == "full" and len(compiler.asked) == 2
    assert "time for the search is over" in lines[-1]
    with pytest.raises(OutOfTime, match="time for the search is over; --limit_s"):
        run(job, "v5e", Compiler(lambda job: False), limit_s=100.0)


@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e", "tpu7x", "gpu:H100-80GB"])
def test_every_kind_has_candidates(make_plan, kind):
    job = make_plan("v5e:2x2", rows=16, **BIG)
    for topology in ladder(kind):
        for mesh in candidate_meshes(job, topology):
            sizes = dataclasses.asdict(mesh)
            assert sizes["fsdp"] * sizes["tensor"] * sizes["context"] == topology.num_devices
