"""What is special about pods: manifests, faults and blame, what is left."""

from __future__ import annotations

import asyncio
import json

import pytest

from skyrl_jax.core.errors import (
    CapacityError,
    ConfigError,
    ImageError,
    InfraError,
    SandboxGone,
)
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox import kubernetes_pod
from skyrl_jax.sandbox.kubernetes import KubernetesProvider
from tests.lanes.kubernetes.conftest import CACHE, provider


def spec(**changes) -> SandboxSpec:
    values = {"image": "an-image", "workdir": "/testbed", "memory_mb": 256, "best_effort": True}
    return SandboxSpec(**{**values, **changes})


def test_the_manifest(cluster) -> None:
    """Limits, no token, no privilege, a deadline, labels: by the API's own names."""

    async def run() -> None:
        async with provider(cluster) as made:
            box = await made.create(spec(cpus=0.5, disk_mb=100, lifetime_s=30.0))
            (pod,) = cluster.pods.values()
            told = pod.body["spec"]
            (container,) = told["containers"]
            assert container["resources"]["limits"] == {
                "cpu": "500m",
                "memory": "256Mi",
                "ephemeral-storage": "100Mi",
            }
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert told["automountServiceAccountToken"] is False
            assert told["activeDeadlineSeconds"] == 90 and told["restartPolicy"] == "Never"
            labels = pod.body["metadata"]["labels"]
            assert labels["skyrl.network"] == "none" and len(labels["skyrl.run"]) <= 63
            (policy,) = (v for k, v in cluster.objects.items() if "networkpolicies" in k)
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
            assert (await box.exec("id -u; cat /proc/1/comm")).output == "1\nsupervisor\n"
            assert (await box.exec("ls -A /.skyrl")).output == "supervisor\n"
            assert "lo" in (await box.exec("cat /proc/net/dev")).output

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"image": "none"}, ImageError, "ErrImagePull: no such image"),
        ({"best_effort": False}, InfraError, "best_effort"),
        ({"shared": "/tmp"}, InfraError, "cannot share"),
        ({"user": 3}, InfraError, "no uid 3"),
    ],
)
def test_what_cannot_be_made(cluster, changes, error, words) -> None:
    async def run() -> None:
        async with provider(cluster) as made:
            with pytest.raises(error, match=words):
                await made.create(spec(**changes))
            assert made.live == 0

    asyncio.run(run())


def test_no_room(cluster) -> None:
    cluster.unschedulable = True

    async def run() -> None:
        async with provider(cluster, start_timeout_s=0.5) as made:
            with pytest.raises(CapacityError, match="0/3 nodes: cpu"):
                await made.create(spec())

    asyncio.run(run())


def test_a_server_that_fails_is_the_hosts_fault(cluster) -> None:
    async def run() -> None:
        async with provider(cluster) as made:
            box = await made.create(spec())
            cluster.broken = True
            with pytest.raises(InfraError, match="500"):
                await made.create(spec())
            cluster.broken = False
            assert (await box.exec("echo fine")).output == "fine\n"

    asyncio.run(run())


def test_a_pod_that_others_delete_is_nobodys_reward(cluster) -> None:
    async def run() -> None:
        async with provider(cluster) as made:
            box = await made.create(spec())
            running = asyncio.ensure_future(box.exec("sleep 50", timeout_s=60))
            await asyncio.sleep(0.3)
            (name,) = cluster.pods
            await made.delete(name)
            with pytest.raises((InfraError, SandboxGone)) as caught:
                await running
            assert not getattr(caught.value, "certain", False)

    asyncio.run(run())


def test_ended_pods_of_dead_owners_are_removed_at_the_start(cluster) -> None:
    async def run() -> None:
        async with provider(cluster) as made:
            box = await made.create(spec())
            box._stream.abort()  # the owner is gone: its input ends, the supervisor ends
            while (await made.status(box._name)).get("phase") == "Running":
                await asyncio.sleep(0.05)
            async with provider(cluster):
                assert cluster.pods == {}

    asyncio.run(run())


def test_without_credentials(tmp_path) -> None:
    bad = tmp_path / "kubeconfig"
    bad.write_text(json.dumps({"apiVersion": "v1"}))
    made = KubernetesProvider(run_id="r", cache_dir=CACHE, config_file=str(bad))
    with pytest.raises(ConfigError, match="credentials"):
        asyncio.run(made.__aenter__())


def test_labels_and_statuses_by_hand() -> None:
    assert len(kubernetes_pod.run_label("A" * 100)) <= 63
    assert kubernetes_pod.run_label("Run.1") != kubernetes_pod.run_label("run-1")
    kind, why = kubernetes_pod.why_not_running({"phase": "Failed", "reason": "Evicted"})
    assert (kind, why) == ("ended", "Evicted")
    killed = {"containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled"}}}]}
    assert kubernetes_pod.ended_for_memory(killed)
    assert not kubernetes_pod.ended_for_memory({"phase": "Running"})
