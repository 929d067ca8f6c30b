"""Names of container images: what a reference says, and where a mirror has it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skyrl_jax.core.errors import ImageError

HUB = "docker.io"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"[A-Za-z0-9.-]+(?::[0-9]+)?|\[[0-9A-Fa-f:]+\](?::[0-9]+)?")
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A parsed image name. Example: ``docker.io/swebench/x:latest``; ``digest`` wins over a tag."""

    host: str
    path: str
    tag: str = "latest"
    digest: str = ""

    @property
    def repository(self) -> str:
        """Return the name that a daemon gives the repository: Docker Hub's host is not said."""
        return self.path if self.host == HUB else f"{self.host}/{self.path}"

    @property
    def name(self) -> str:
        """Return the whole name for a daemon."""
        return self.repository + (f"@{self.digest}" if self.digest else f":{self.tag}")

    @property
    def path_there(self) -> str:
        """Return the repository's name at its registry: Docker Hub's own lie under library/."""
        plain = self.host == HUB and "/" not in self.path
        return f"library/{self.path}" if plain else self.path

    @property
    def url(self) -> str:
        """Return the registry's address; like a daemon, loopback ones are spoken to over http."""
        if self.host == HUB:
            return "https://registry-1.docker.io"
        scheme = "http" if _LOOPBACK.fullmatch(self.host.rsplit(":", 1)[0]) else "https"
        return f"{scheme}://{self.host}"

    @property
    def manifest(self) -> str:
        """Return what names the manifest at the registry: the digest, or the tag."""
        return self.digest or self.tag


def parse_reference(text: str) -> Reference:
    """Read an image name as docker does.

    Raises:
        ImageError: it is none; the message says what is wrong.
    """
    rest, _, digest = text.partition("@")
    if digest and not _DIGEST.fullmatch(digest):
        raise ImageError(f"image name {text!r}: the digest must be sha256: and 64 hex digits")
    first, slash, tail = rest.partition("/")
    host = HUB
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, rest = first, tail
    if not _HOST.fullmatch(host):
        raise ImageError(f"image name {text!r}: {host!r} is no host of a registry")
    path, colon, tag = rest.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise ImageError(f"image name {text!r}: {tag!r} is no tag")
    if host == HUB and path.startswith("library/"):
        path = path.removeprefix("library/")
    if not _PATH.fullmatch(path):
        raise ImageError(
            f"image name {text!r}: {path!r} must be lower-case letters, digits and single . _ - "
            "between them, parts divided by /"
        )
    return Reference(
        host="docker.io" if host == "index.docker.io" else host,
        path=path,
        tag=tag or "latest",
        digest=digest,
    )


def mirrored(reference: Reference, mirror: str) -> Reference:
    """Return where a mirror has an image of Docker Hub; other registries are asked themselves.

    Args:
        reference: the image.
        mirror: "host[:port][/prefix]", "" = none.

    Raises:
        ImageError: the mirror has another form.
    """
    if not mirror or reference.host != HUB:
        return reference
    found = parse_reference(f"{mirror.rstrip('/')}/{reference.path_there}")
    if found.host == HUB:
        raise ImageError(
            f"sandbox.image_mirror is {mirror!r}: it must begin with a registry's host, such as "
            "registry.example.org:5000 or registry.example.org/prefix"
        )
    return Reference(host=found.host, path=found.path, tag=reference.tag, digest=reference.digest)
