"""A fake Kubernetes API server: objects in memory, each pod's container run by bubblewrap.

It speaks as much of the API as the provider uses: ConfigMaps, NetworkPolicies, pods (create, read,
list, delete) and their attach over a websocket (v4.channel.k8s.io). A pod's command is really run,
in namespaces of its own with the ConfigMap's files and empty volumes mounted, so that the contract
suite tests the whole path but the cluster itself.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "a-token"
PODS = "/api/v1/namespaces/{space}/pods"


@dataclass(eq=False)
class Pod:
    """A pod and the process that is its container."""

    body: dict[str, Any]
    folder: Path
    process: asyncio.subprocess.Process | None = None
    status: dict[str, Any] = field(default_factory=lambda: {"phase": "Pending"})

    def shown(self) -> dict[str, Any]:
        return {**self.body, "status": self.status}


class FakeApi:
    """The server. ``pods``: by name; ``requests``: "METHOD path"; ``base``: root of every image.

    ``unschedulable`` and images called "none" behave as in a cluster.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.pods: dict[str, Pod] = {}
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.unschedulable = False
        self.broken = False
        self.address = self.config = ""
        self._running: set[asyncio.Future[None]] = set()

    # -- objects ---------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _failure(401, "Unauthorized")
        if self.broken:
            return _failure(500, "etcd is away")
        return await handler(request)

    async def _create_object(self, request: web.Request) -> web.Response:
        body = await request.json()
        key = f"{request.path}/{body['metadata']['name']}"
        if key in self.objects:
            return _failure(409, "AlreadyExists")
        self.objects[key] = body
        return web.json_response(body, status=201)

    async def _create_pod(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.pods:
            return _failure(409, "AlreadyExists")
        pod = Pod(body=body, folder=Path(tempfile.mkdtemp(prefix="fake-pod-")))
        pod.folder.chmod(0o755)
        self.pods[name] = pod
        (container,) = body["spec"]["containers"]
        if container["image"] == "none":
            state = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
            pod.status["containerStatuses"] = _container_statuses(container["image"], state)
        elif self.unschedulable:
            told = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: cpu"}
            pod.status["conditions"] = [told]
        else:
            asyncio.get_running_loop().call_later(0.05, self._start, pod, container)
        return web.json_response(pod.shown(), status=201)

    async def _read_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod.shown()) if pod else _failure(404, "NotFound")

    async def _list_pods(self, request: web.Request) -> web.Response:
        label = request.query.get("labelSelector", "")
        items = [p.shown() for p in self.pods.values() if label in p.body["metadata"]["labels"]]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": items})

    async def _delete_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.pop(request.match_info["name"], None)
        if pod is None:
            return _failure(404, "NotFound")
        await self._end(pod)
        return web.json_response(pod.shown())

    # -- containers ------------------------------------------------------------------------------

    def _start(self, pod: Pod, container: dict[str, Any]) -> None:
        self._running.add(asyncio.ensure_future(self._run(pod, container)))

    async def _run(self, pod: Pod, container: dict[str, Any]) -> None:
        security = container["securityContext"]
        command = ["bwrap", "--die-with-parent", "--unshare-pid", "--as-pid-1", "--unshare-ipc"]
        command += ["--unshare-net"] if _no_network(pod.body) else []
        for capability in security["capabilities"]["add"]:
            command += ["--cap-add", f"CAP_{capability}"]
        command += ["--tmpfs", "/"]
        for item in sorted(self.base.iterdir()):
            target = f"/{item.name}"
            if item.is_symlink():
                command += ["--symlink", str(item.readlink()), target]
            elif item.name not in ("proc", "dev", "tmp"):
                command += ["--ro-bind", str(item), target]
        command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp"]
        volumes = {volume["name"]: volume for volume in pod.body["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            command += self._mount(pod, volumes[mount["name"]], mount["mountPath"])
        process = await asyncio.create_subprocess_exec(
            *command,
            "--",
            *container["command"],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        pod.process, pod.status = process, {"phase": "Running"}
        deadline = pod.body["spec"]["activeDeadlineSeconds"]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), deadline)
        await self._end(pod)
        ended = {"reason": "Error" if process.returncode else "Completed"}
        ended["exitCode"] = process.returncode
        phase = "Failed" if process.returncode else "Succeeded"
        pod.status = {
            "phase": phase,
            "containerStatuses": _container_statuses(container["image"], {"terminated": ended}),
        }

    def _mount(self, pod: Pod, volume: dict[str, Any], path: str) -> list[str]:
        folder = pod.folder / volume["name"]
        folder.mkdir()
        if "emptyDir" in volume:
            folder.chmod(0o777)
            return ["--bind", str(folder), path]
        name = volume["configMap"]["name"]
        space = pod.body["metadata"]["namespace"]
        carried = self.objects[f"/api/v1/namespaces/{space}/configmaps/{name}"]
        for key, value in carried["binaryData"].items():
            (folder / key).write_bytes(base64.b64decode(value))
            (folder / key).chmod(volume["configMap"]["defaultMode"])
        return ["--ro-bind", str(folder), path]

    async def _end(self, pod: Pod) -> None:
        if pod.process is not None and pod.process.returncode is None:
            pod.process.kill()
            await pod.process.wait()
        shutil.rmtree(pod.folder, ignore_errors=True)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None or pod.process is None:
            return _failure(400, "the container does not run")
        process = pod.process
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=4 << 20)
        await socket.prepare(request)

        async def pump(stream: asyncio.StreamReader, number: int) -> None:
            while data := await stream.read(1 << 16):
                await socket.send_bytes(bytes([number]) + data)

        pumps = [
            asyncio.ensure_future(pump(stream, number))
            for stream, number in ((process.stdout, 1), (process.stderr, 2))
        ]
        ended = asyncio.ensure_future(self._close_at_end(process, pumps, socket))
        with contextlib.suppress(ConnectionError):
            async for message in socket:
                if message.type is web.WSMsgType.BINARY and message.data[:1] == b"\0":
                    process.stdin.write(message.data[1:])
                    await process.stdin.drain()
        with contextlib.suppress(OSError):
            process.stdin.close()  # stdinOnce
        await asyncio.wait({ended}, timeout=10)
        return socket

    async def _close_at_end(self, process: Any, pumps: list[Any], socket: Any) -> None:
        await process.wait()
        await asyncio.wait(pumps, timeout=5)
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\3" + json.dumps({"status": "Success"}).encode())
            await socket.close()

    # -- serving ---------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=16 << 20)
        app.router.add_post("/api/v1/namespaces/{space}/configmaps", self._create_object)
        policies = "/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies"
        app.router.add_post(policies, self._create_object)
        app.router.add_post(PODS, self._create_pod)
        app.router.add_get(PODS, self._list_pods)
        app.router.add_get(PODS + "/{name}", self._read_pod)
        app.router.add_delete(PODS + "/{name}", self._delete_pod)
        app.router.add_get(PODS + "/{name}/attach", self._attach)
        return app

    @contextlib.contextmanager
    def serve(self) -> Iterator[FakeApi]:
        """Serve in a thread of its own."""
        loop = asyncio.new_event_loop()
        watcher = asyncio.ThreadedChildWatcher()
        asyncio.set_child_watcher(watcher)
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        def wait(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result(30)

        async def begin() -> web.AppRunner:
            runner = web.AppRunner(self._app())
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return runner

        runner = wait(begin())
        try:
            yield self
        finally:
            for pod in list(self.pods.values()):
                wait(self._end(pod))
            wait(runner.cleanup())
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


def _container_statuses(image: str, state: dict[str, Any]) -> list[dict[str, Any]]:
    about = {"name": "box", "image": image, "imageID": "", "ready": False, "restartCount": 0}
    return [{**about, "state": state}]


def _no_network(body: dict[str, Any]) -> bool:
    return bool(body["metadata"]["labels"]["skyrl.network"] == "none")


def _failure(status: int, reason: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "code": status}
    return web.json_response(body, status=status)


def kubeconfig(path: Path, address: str) -> Path:
    """Write the credentials of the fake."""
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "clusters": [{"name": "fake", "cluster": {"server": address}}],
                "users": [{"name": "me", "user": {"token": TOKEN}}],
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
            }
        )
    )
    return path
