"""A task's layers as a docker image: made once per image and layers, then only named.

Putting a layer into every container costs an upload and an unpacking each time; an image that holds
it costs nothing. Such images are called ``skyrl-layers:<digest of image and layers>`` and stay for
the next run; the oldest go when there are more than ``KEPT``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_jax.core.errors import ImageError

REPOSITORY = "skyrl-layers"
LABEL_BASE = "skyrl.base"  # of an image that was made here: what it was made of
SEED = "/.skyrl/seed"  # with a read-only root: what the working directory starts with
KEPT = 512
LAYERS_TIMEOUT_S = 1800.0  # of making an image: a large layer takes a while


def layers_image(
    client: Any,
    patient: Any,
    image: str,
    layers: Sequence[str],
    *,
    seeded: str,
    name: str,
    labels: Mapping[str, str],
    remove: Callable[[str], None],
) -> str:
    """Return the tag of ``image`` with ``layers`` over it (the first on top), made where missing.

    Args:
        client: the daemon's API client.
        patient: another, with a time-out that suits uploads.
        image: what lies below.
        layers: host directories.
        seeded: this directory's content is put under ``SEED`` instead ("" = none is).
        name: of the container that is made for it.
        labels: of that container, so that a reaper knows it.
        remove: removes that container.

    Raises:
        ImageError: a layer is no directory, or ``seeded`` has content in the image itself.
    """
    for layer in layers:
        if not os.path.isdir(layer):
            raise ImageError(f"sandbox layer {layer} is not a directory")
    number = client.inspect_image(image)["Id"]
    tag = _digest(number, layers, seeded)
    if client.images(name=f"{REPOSITORY}:{tag}", quiet=True):
        return f"{REPOSITORY}:{tag}"
    try:  # by its name from the first request on: the answer to that may be lost
        client.create_container(
            image, name=name, entrypoint=["/none"], command=[], labels=dict(labels)
        )
        if seeded:
            _refuse_hidden(patient, name, image, seeded)
        for layer in reversed(layers):
            put_layer(patient, name, layer, seeded)
        changes = f"LABEL {LABEL_BASE}={number}"
        patient.commit(name, repository=REPOSITORY, tag=tag, changes=changes)
    except BaseException:
        with contextlib.suppress(Exception):
            remove(name)
        raise
    remove(name)
    _evict(client)
    return f"{REPOSITORY}:{tag}"


def put_layer(client: Any, container: str, layer: str, seeded: str) -> None:
    """Unpack a layer into a container that was not started; all of it belongs to uid 1."""
    home = seeded.strip("/")

    def moved(name: str) -> str:
        if home and (name == home or name.startswith(home + "/")):
            return SEED.lstrip("/") + name[len(home) :]
        return name

    def owned_by_agent(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 1
        member.uname = member.gname = ""
        member.name = moved(member.name)
        if member.islnk():
            member.linkname = moved(member.linkname)
        return member

    with tempfile.TemporaryFile() as spool:
        with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted(os.listdir(layer)):
                archive.add(os.path.join(layer, name), arcname=name, filter=owned_by_agent)
        spool.seek(0)
        client.put_archive(container, "/", spool)


def layer_tar(layer: str) -> bytes:
    """Return a layer as a tar whose members all belong to uid 1."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(os.listdir(layer)):
            archive.add(os.path.join(layer, name), arcname=name)
    return out.getvalue()


def _digest(image_id: str, layers: Sequence[str], seeded: str) -> str:
    """Return a name of what the image will hold: paths, modes, sizes and times of every file."""
    digest = hashlib.sha256(f"{image_id}\0{seeded}".encode())
    for layer in layers:
        digest.update(b"\0layer")
        for folder, names, files in os.walk(layer):
            names.sort()
            inside = os.path.relpath(folder, layer)
            for name in sorted([*names, *files]):
                info = os.lstat(os.path.join(folder, name))
                line = f"{inside}/{name} {info.st_mode} {info.st_size} {info.st_mtime_ns}\0"
                digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _refuse_hidden(client: Any, container: str, image: str, seeded: str) -> None:
    """Refuse an image whose own files would vanish behind the tmpfs of a read-only sandbox."""
    import docker.errors

    try:
        stream, _ = client.get_archive(container, seeded)
    except docker.errors.NotFound:
        return
    members = 0
    with contextlib.closing(stream), tempfile.TemporaryFile() as spool:
        for chunk in stream:
            spool.write(chunk)
            if spool.tell() > 1 << 16:  # a folder alone is shorter
                members = 2
                break
        else:
            spool.seek(0)
            with tarfile.open(fileobj=spool) as archive:
                members = len(archive.getmembers())
    if members > 1:
        raise ImageError(
            f"docker image {image} has files in {seeded}, which sandbox.docker_read_only would "
            "hide behind an empty tmpfs: give the tree as a layer, or set it to False"
        )


def _evict(client: Any) -> None:
    import docker.errors

    found = sorted(client.images(name=REPOSITORY), key=lambda image: image["Created"])
    for image in found[: max(0, len(found) - KEPT)]:
        with contextlib.suppress(docker.errors.APIError):  # in use: later
            client.remove_image(image["Id"])
