"""What a Kubernetes sandbox is made of, as plain objects of the API. Pure.

A sandbox is a pod with one container whose PID 1 is the supervisor (a file of a ConfigMap), with
the pod's standard input as its channel: when the owner's websocket ends, so does the supervisor,
and with it the pod. ``activeDeadlineSeconds`` ends it in any case.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import InfraError
from skyrl_jax.core.protocols import SandboxSpec

LABEL_RUN = "skyrl.run"
LABEL_NETWORK = "skyrl.network"
CONTAINER = "box"
_SUPERVISOR = "/.skyrl"
_LIFE_MARGIN_S = 60  # scheduling and pulling count as the pod's life
_NAME = re.compile(r"[^a-z0-9]+")


def run_label(run: str) -> str:
    """Return a run's name as a label may have it: at most 63 of letters, digits, ``-_.``."""
    digest = hashlib.sha256(run.encode()).hexdigest()[:12]
    return f"{_NAME.sub('-', run.lower()).strip('-')[:48]}-{digest}".lstrip("-")


def config_map(supervisor: Path, namespace: str) -> dict[str, Any]:
    """Return the ConfigMap that carries the supervisor into pods; its name says what is in it.

    Raises:
        InfraError: the program is larger than a ConfigMap may be.
    """
    data = supervisor.read_bytes()
    if len(data) > 1 << 20:
        raise InfraError(
            f"the supervisor has {len(data)} bytes, a ConfigMap takes 1 MiB", cause="kubernetes"
        )
    name = f"skyrl-supervisor-{hashlib.sha256(data).hexdigest()[:16]}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "immutable": True,
        "binaryData": {"supervisor": base64.b64encode(data).decode()},
    }


def network_policy(namespace: str) -> dict[str, Any]:
    """Return the policy that cuts pods labelled ``skyrl.network=none`` off, both ways.

    A cluster whose network plugin knows no policies ignores it.
    """
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "skyrl-no-network", "namespace": namespace},
        "spec": {
            "podSelector": {"matchLabels": {LABEL_NETWORK: "none"}},
            "policyTypes": ["Ingress", "Egress"],
        },
    }


def mount_points(spec: SandboxSpec, layers: Mapping[str, list[str]]) -> list[str]:
    """Return where a pod needs volumes of its own: the working directory, and what layers fill.

    Args:
        spec: the sandbox.
        layers: {layer: its first two levels, as absolute paths inside}.
    """
    home = "/" + spec.workdir.strip("/")
    found = [] if home == "/" else [home]
    for paths in layers.values():
        for path in paths:
            if home == "/" or (path != home and not path.startswith(home + "/")):
                found.append(path)
    return list(dict.fromkeys(found))


def pod(
    name: str, spec: SandboxSpec, *, namespace: str, run: str, supervisor: str, mounts: list[str]
) -> dict[str, Any]:
    """Return the pod of a sandbox.

    Args:
        name: of the pod.
        spec: the sandbox.
        namespace: of everything.
        run: the owner's label.
        supervisor: name of the ConfigMap.
        mounts: absolute paths that get an empty volume each.
    """
    command = [f"{_SUPERVISOR}/supervisor", "--mode", "pid1", "--uid", str(spec.user)]
    command += ["--fsize", str(spec.disk_mb << 20), "--life", str(math.ceil(spec.lifetime_s))]
    limits = {
        "cpu": f"{max(1, round(spec.cpus * 1000))}m",
        "memory": f"{spec.memory_mb}Mi",
        "ephemeral-storage": f"{spec.disk_mb}Mi",
    }
    volumes: list[dict[str, Any]] = [
        {"name": "supervisor", "configMap": {"name": supervisor, "defaultMode": 0o555}}
    ]
    mounted = [{"name": "supervisor", "mountPath": _SUPERVISOR, "readOnly": True}]
    for number, path in enumerate(mounts):
        volumes.append({"name": f"v{number}", "emptyDir": {"sizeLimit": f"{spec.disk_mb}Mi"}})
        mounted.append({"name": f"v{number}", "mountPath": path})
    container = {
        "name": CONTAINER,
        "image": spec.image,
        "command": command,
        "stdin": True,
        "stdinOnce": True,
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["SETUID", "SETGID", "KILL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": mounted,
    }
    network = "open" if spec.network else "none"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {LABEL_RUN: run, LABEL_NETWORK: network},
        },
        "spec": {
            "containers": [container],
            "volumes": volumes,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": math.ceil(spec.lifetime_s) + _LIFE_MARGIN_S,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
        },
    }


def why_not_running(status: Mapping[str, Any]) -> tuple[str, str]:
    """Return ("image" | "ended" | "capacity" | "", words) of a pod that does not run yet.

    Args:
        status: of the pod, as the API gives it.
    """
    for found in status.get("containerStatuses") or ():
        waiting = (found.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if "Image" in reason:  # ErrImagePull, ImagePullBackOff, InvalidImageName, ...
            return "image", f"{reason}: {waiting.get('message') or ''}"
        ended = (found.get("state") or {}).get("terminated")
        if ended:
            return "ended", f"{ended.get('reason')}, exit code {ended.get('exitCode')}"
    if status.get("phase") in ("Failed", "Succeeded"):
        return "ended", str(status.get("reason") or status.get("phase"))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return "capacity", str(condition.get("message") or condition.get("reason"))
    return "", str(status.get("phase") or "no status")


def ended_for_memory(status: Mapping[str, Any]) -> bool:
    """Say whether the container's end was a kill for memory."""
    states = (found.get("state") or {} for found in status.get("containerStatuses") or ())
    return any((state.get("terminated") or {}).get("reason") == "OOMKilled" for state in states)
