"""Container images at a docker daemon: there when a sandbox needs them, gone when disk runs short.

    ensure(name)    on this machine? else asked for at its registry (image_registry.py), pulled by
                    the daemon, tried again on 429 and 5xx (image_retry.py), noted (image_shelf.py)
    prepare(name)   the image with its task's tree made ready for agents (image_prepare.py), once

Who asks for the same image at once shares one pull. An image that failed for good (it is not there,
it cannot be prepared) is in quarantine: whoever asks again hears the first cause at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from skyrl_jax.core.errors import ImageError, InfraError
from skyrl_jax.sandbox.docker_layers import LABEL_BASE
from skyrl_jax.sandbox.docker_sandbox import ContainerMaker
from skyrl_jax.sandbox.image_auth import read_logins
from skyrl_jax.sandbox.image_names import Reference, mirrored, parse_reference
from skyrl_jax.sandbox.image_prepare import SCRIPT, Prepared, read_outcome
from skyrl_jax.sandbox.image_registry import Registry
from skyrl_jax.sandbox.image_retry import TryLater, retried
from skyrl_jax.sandbox.image_shelf import Shelf, too_much

T = TypeVar("T")
REPOSITORY = "skyrl-prepared"
_OURS = "skyrl-"  # images that are made on this machine: no registry has them
_TOUCH_S = 60.0
_STALL_S = 120.0  # without a word of a pull
_PREPARE_S = 900.0
_LIMITED = ("toomanyrequests", "429", "rate limit", "503", "502", "500 internal")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How images come and go.

    Args:
        mirror: "host[:port][/prefix]" that is asked in place of Docker Hub; "" = none.
        login_file: in the form of docker's config.json; "" = nobody in particular.
        disk_gb: of all images that we pulled, layers that they share counted each time; 0 = any.
        pulls: at a time.
        pull_timeout_s: of one image, all tries together.
    """

    mirror: str = ""
    login_file: str = ""
    disk_gb: float = 0.0
    pulls: int = 2
    pull_timeout_s: float = 1800.0


class ImageStore:
    """The images of one daemon.

    Args:
        daemon: connected.
        options: see there.
        folder: where the shelf's file is kept.
        say: takes a line for a person: a pull begins, ends, waits.
    """

    def __init__(
        self,
        daemon: ContainerMaker,
        options: ImageOptions,
        folder: Path,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Read the logins; nothing is reached.

        Raises:
            ConfigError: the file of logins.
        """
        self._daemon = daemon
        self._options = options
        self._say = say
        self._registry = Registry(read_logins(options.login_file))
        self._gate = asyncio.Semaphore(options.pulls)
        self._shelf = Shelf(folder / "images.json")
        self._jobs: dict[str, asyncio.Task[Any]] = {}
        self._bad: dict[str, ImageError] = {}
        self._held: Counter[str] = Counter()
        self._recipes: dict[str, tuple[str, str, str]] = {}  # of what was prepared: of what, how
        self._touched: dict[str, float] = {}

    async def close(self) -> None:
        """Cancel what is under way and close the connections."""
        for job in self._jobs.values():
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs.values(), timeout=10.0)
        await self._registry.close()

    @property
    def quarantine(self) -> dict[str, str]:
        """Return the images that failed for good, and why."""
        return {name: str(error) for name, error in self._bad.items()}

    @contextlib.asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[str]:
        """Have an image and keep it while the block runs, whatever the disk budget wants."""
        self._held[name] += 1
        try:
            yield await self.ensure(name)
        finally:
            self._held[name] -= 1

    async def ensure(self, name: str) -> str:
        """Return the name under which the daemon has an image, pulled if it had not.

        Raises:
            ImageError: it is not there, may not be had, or is in quarantine.
            InfraError: the registry or the daemon failed, or the time ran out.
        """
        return await self._once(name, lambda: self._ensure(name))

    async def prepare(self, name: str, *, workdir: str, commit: str) -> Prepared:
        """Return the image with its tree made ready for agents; made once, then only looked up.

        Raises:
            ImageError: it cannot be had or made ready.
            InfraError: as ``ensure``.
        """
        return await self._once(
            f"{name} {workdir} {commit}", lambda: self._prepare(name, workdir, commit)
        )

    async def pull_all(self, names: Sequence[str]) -> dict[str, str]:
        """Have many images; return {name: why not} of those that could not be had."""

        async def one(name: str) -> tuple[str, str]:
            try:
                await self.ensure(name)
            except (ImageError, InfraError) as error:
                return name, str(error)
            return name, ""

        found = await asyncio.gather(*(one(name) for name in dict.fromkeys(names)))
        return {name: why for name, why in found if why}

    async def _once(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        if key in self._bad:
            raise self._bad[key]
        job = self._jobs.get(key)
        if job is None or job.done():

            async def run() -> T:
                try:
                    return await work()
                except ImageError as error:
                    self._bad.setdefault(key, error)
                    raise

            job = self._jobs[key] = asyncio.ensure_future(run())
            job.add_done_callback(lambda done: done.cancelled() or done.exception())
        found: T = await asyncio.shield(job)
        return found

    # -- having ----------------------------------------------------------------------------------

    def touch(self, name: str) -> None:
        """Remember that an image is used now; the file hears of it once a minute."""
        now = time.monotonic()
        if now - self._touched.get(name, -_TOUCH_S) >= _TOUCH_S:
            self._touched[name] = now
            self._shelf.touch(parse_reference(self._recipes.get(name, (name,))[0]).name)

    async def _ensure(self, name: str) -> str:
        reference = parse_reference(name)
        if await self._daemon.call(self._size, reference.name) is None:
            if reference.name in self._recipes:  # the disk budget took it
                return (await self._prepare(*self._recipes[reference.name])).image
            if reference.path.startswith(_OURS):
                raise ImageError(
                    f"docker image not found: {reference.name} (the sandbox's own image is made by "
                    "the two commands in skyrl_jax/sandbox/images.py)"
                )
            async with self._gate:
                await self._pull(reference)
        else:
            await asyncio.to_thread(self._shelf.touch, reference.name)
        return reference.name

    def _size(self, name: str) -> int | None:
        import docker.errors

        try:
            found = self._daemon.client.inspect_image(name)
        except docker.errors.ImageNotFound:
            return None
        return int(found.get("Size") or 0)

    async def _pull(self, reference: Reference) -> None:
        source = mirrored(reference, self._options.mirror)
        what = f"image {reference.name}" + (f" from {source.host}" if source != reference else "")
        await self._make_room(reference.name)
        self._say(f"{what}: pulling")
        await retried(
            lambda: self._attempt(source, reference),
            what=what,
            timeout_s=self._options.pull_timeout_s,
            say=self._say,
        )
        size = await self._daemon.call(self._size, reference.name)
        if size is None:
            raise InfraError(f"{what} was pulled, and the daemon has it not", cause="pull")
        await asyncio.to_thread(self._shelf.note, reference.name, size)
        self._say(f"{what}: here, {size / 1e9:.2f} GB")
        await self._make_room(reference.name)

    async def _attempt(self, source: Reference, reference: Reference) -> None:
        """Ask the registry first: it says why not, and when to come back; then pull what it named.

        Raises:
            ImageError, TryLater: see image_registry.py.
        """
        digest = await self._registry.digest(source)
        exact = f"{source.repository}@{digest}" if digest else source.name
        stop = threading.Event()
        try:
            await self._daemon.call(
                self._pull_there,
                source,
                exact,
                reference,
                stop,
                seconds=self._options.pull_timeout_s,
            )
        finally:
            stop.set()

    def _pull_there(
        self, source: Reference, exact: str, reference: Reference, stop: threading.Event
    ) -> None:
        import docker.errors

        login = self._registry.login(source)
        client = self._daemon.new_client(_STALL_S)
        repository, _, rest = exact.partition("@")
        tag = rest or source.manifest
        try:
            with contextlib.closing(client):
                events = client.pull(
                    repository, tag=tag, stream=True, decode=True, auth_config=login.for_daemon()
                )
                for event in events:
                    if stop.is_set():
                        return
                    if "error" in event:
                        raise _told(reference, login.hide(str(event["error"])))
                if not reference.digest:
                    client.tag(exact, reference.repository, reference.tag)
        except docker.errors.APIError as error:
            raise _told(reference, login.hide(str(error.explanation or error))) from None

    # -- room ------------------------------------------------------------------------------------

    async def _make_room(self, coming: str) -> None:
        limit = int(self._options.disk_gb * 1e9)
        if not limit:
            return
        busy = [parse_reference(name).name for name, count in self._held.items() if count]
        busy.append(coming)
        while surplus := too_much(await asyncio.to_thread(self._shelf.kept), limit, busy):
            item = surplus[0]
            if not await self._daemon.call(self._remove, item.name, seconds=300.0):
                busy.append(item.name)  # a container uses it
                continue
            await asyncio.to_thread(self._shelf.forget, item.name)
            self._forget_jobs(item.name)
            self._say(f"image {item.name}: removed, {item.size / 1e9:.2f} GB (disk budget)")

    def _remove(self, name: str) -> bool:
        """Remove an image and what was made of it; one that a container uses stays."""
        import docker.errors

        client = self._daemon.client
        try:
            number = client.inspect_image(name)["Id"]
            for made in _made_of(client, number):
                client.remove_image(made)
            client.remove_image(name)
        except docker.errors.ImageNotFound:
            return True
        except docker.errors.APIError:  # a container uses it
            return False
        return True

    def _forget_jobs(self, name: str) -> None:
        for key in list(self._jobs):
            same = parse_reference(key.partition(" ")[0]).name == name
            if same and self._jobs[key].done():
                del self._jobs[key]

    # -- making ready ----------------------------------------------------------------------------

    async def _prepare(self, name: str, workdir: str, commit: str) -> Prepared:
        async with self.held(name) as image:
            made = await self._daemon.call(
                self._prepare_there, image, workdir, commit, seconds=_PREPARE_S
            )
        self._recipes[made.image] = (name, workdir, commit)
        return made

    def _prepare_there(self, image: str, workdir: str, commit: str) -> Prepared:
        client = self._daemon.client
        number = client.inspect_image(image)["Id"]
        key = json.dumps([number, workdir, commit, SCRIPT])
        tag = hashlib.sha256(key.encode()).hexdigest()[:32]
        made = f"{REPOSITORY}:{tag}"
        for found in client.images(name=made):
            labels = found.get("Labels") or {}
            return Prepared(
                image=made, commit=labels["skyrl.commit"], path=labels.get("skyrl.path", "")
            )
        patient = self._daemon.new_client(_PREPARE_S)
        with contextlib.closing(patient):
            container = patient.create_container(
                image,
                entrypoint=["/bin/sh", "-c", SCRIPT, "prepare", workdir, commit],
                command=[],
                user="0:0",
                network_disabled=True,
                labels=self._daemon.labels(),
                host_config=patient.create_host_config(network_mode="none"),
            )["Id"]
            try:
                patient.start(container)
                code = int(patient.wait(container, timeout=_PREPARE_S)["StatusCode"])
                output = patient.logs(container).decode("utf-8", "replace")
                ready = read_outcome(code, output, image=image, workdir=workdir, commit=commit)
                labels = {
                    LABEL_BASE: number,
                    "skyrl.commit": ready.commit,
                    "skyrl.path": ready.path,
                }
                changes = [f"LABEL {key}={json.dumps(value)}" for key, value in labels.items()]
                patient.commit(container, repository=REPOSITORY, tag=tag, changes=changes)
            finally:
                self._daemon.remove(container)
        return Prepared(image=made, commit=ready.commit, path=ready.path)


def _made_of(client: Any, number: str) -> list[str]:
    """Return the images that were made here of an image, the last made first."""
    found: list[str] = []
    todo = [number]
    while todo:
        base = todo.pop()
        for image in client.images(filters={"label": f"{LABEL_BASE}={base}"}):
            if image["Id"] not in found:
                found.append(image["Id"])
                todo.append(image["Id"])
    return found[::-1]


def _told(reference: Reference, said: str) -> Exception:
    """Return the error for what the daemon said of a pull: for good, or for now."""
    low = said.lower()
    text = f"image {reference.name}: the daemon says: {said.strip()[-500:]}"
    if any(word in low for word in _LIMITED):
        return TryLater(text, limited=True)
    if "no matching manifest" in low or "unsupported" in low or "manifest unknown" in low:
        return ImageError(text)
    return TryLater(text)
