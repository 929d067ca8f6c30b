"""Frames and file-tree records: the bytes between the host and the supervisor (native/wire.h)."""

from __future__ import annotations

import io
import math
import posixpath
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from skyrl_jax.core.errors import DataError

TIMED_OUT, TRUNCATED, CANCELLED, STUCK = 1, 2, 4, 8
MAX_STDIN = 200 << 20
_REQUEST = struct.Struct("<IcIIIIIII")
_REPLY = struct.Struct("<IiIQQII")
_RECORD = struct.Struct("<cIIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A decoded reply. ``head + tail`` is the kept output, ``total`` the bytes written."""

    request_id: int
    code: int
    flags: int
    seconds: float
    total: int
    head: bytes
    tail: bytes

    def text(self) -> str:
        """Return the output as text; a cut is stated where it was made."""
        if not self.flags & TRUNCATED:
            return (self.head + self.tail).decode("utf-8", "replace")
        cut = self.total - len(self.head) - len(self.tail)
        note = f"\n[... {cut} bytes cut ...]\n"
        return self.head.decode("utf-8", "replace") + note + self.tail.decode("utf-8", "replace")


def command_args(command: str | Sequence[str], timeout_s: float) -> list[str]:
    """Return a command's argv.

    Raises:
        DataError: it is empty, or its limit is no finite number.
    """
    args = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not args:
        raise DataError("a command for the sandbox must name a program; the list is empty")
    if not math.isfinite(timeout_s):
        raise DataError(f"timeout_s must be a finite number of seconds, got {timeout_s}")
    return args


def request(
    kind: bytes,
    request_id: int,
    *,
    args: Sequence[str],
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    timeout_s: float,
    head_cap: int,
    tail_cap: int,
    stdin: bytes = b"",
) -> bytes:
    """Encode one request frame.

    Raises:
        DataError: a string holds a NUL byte, or stdin is too long.
    """
    variables = [f"{key}={value}" for key, value in (env or {}).items()]
    strings = [cwd, *args, *variables]
    if any("\0" in text for text in strings):
        raise DataError("a command, path or variable for the sandbox holds a NUL byte")
    if len(stdin) > MAX_STDIN:
        raise DataError(f"stdin of {len(stdin)} bytes is over the limit of {MAX_STDIN}")
    body = b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in strings) + stdin
    head = _REQUEST.pack(
        _REQUEST.size - 4 + len(body),
        kind,
        request_id,
        max(1, min(int(timeout_s * 1000), 0xFFFFFFFF)),
        head_cap,
        tail_cap,
        len(args),
        len(variables),
        len(stdin),
    )
    return head + body


def cancel(request_id: int) -> bytes:
    """Encode the frame that ends a running command."""
    return struct.pack("<IcI", 5, b"C", request_id)


def ping(request_id: int) -> bytes:
    """Encode the frame that is answered at once, with an empty reply."""
    return struct.pack("<IcI", 5, b"N", request_id)


def parse_reply(payload: bytes) -> Reply:
    """Decode the payload of an ``R`` frame."""
    fields = _REPLY.unpack_from(payload, 1)
    start = 1 + _REPLY.size
    middle = start + fields[5]
    return Reply(
        request_id=fields[0],
        code=fields[1],
        flags=fields[2],
        seconds=fields[3] / 1e6,
        total=fields[4],
        head=payload[start:middle],
        tail=payload[middle : middle + fields[6]],
    )


def safe_name(name: str) -> str:
    """Return a tar member's name relative to the root ("" for the root itself).

    Raises:
        DataError: the name is absolute or leaves the root.
    """
    clean = posixpath.normpath(name)
    if name.startswith("/") or clean == ".." or clean.startswith("../"):
        raise DataError(f"tar member {name!r} leaves the target directory")
    return "" if clean == "." else clean


def tar_to_records(tar: bytes) -> bytes:
    """Turn a tar stream into the supervisor's records, refusing what leaves the target.

    Raises:
        DataError: not a tar stream; an absolute path, ``..``, a link that leaves the target, a hard
            link to what is not there, or a device.
    """
    parts: list[bytes] = []
    links: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for member in archive:
                parts.extend(_member_records(archive, member, links))
    except tarfile.TarError as error:
        raise DataError(f"not a tar stream that can be unpacked: {error}") from error
    return b"".join([*parts, b"."])


def _member_records(
    archive: tarfile.TarFile, member: tarfile.TarInfo, links: set[str]
) -> Iterator[bytes]:
    name = safe_name(member.name)
    parents = [name[:at] for at, char in enumerate(name) if char == "/"]
    if any(parent in links for parent in parents):
        raise DataError(f"tar member {member.name!r} goes through a link of the same stream")
    if member.isdir():
        if name:
            yield _record(b"D", member.mode, name, b"")
    elif member.issym():
        safe_name(posixpath.join(posixpath.dirname(name), member.linkname))
        if member.linkname.startswith("/"):
            raise DataError(f"tar member {member.name!r} links to an absolute path")
        links.add(name)
        yield _record(b"L", 0o777, name, member.linkname.encode("utf-8", "surrogateescape"))
    elif member.isfile() or member.islnk():
        if member.islnk():
            safe_name(member.linkname)
        try:
            file = archive.extractfile(member)
        except KeyError:  # tarfile looks a hard link's target up by name
            raise DataError(
                f"tar member {member.name!r} is a hard link to {member.linkname!r}, which the "
                "stream lacks"
            ) from None
        links.discard(name)
        yield _record(b"F", member.mode, name, file.read() if file else b"")
    else:
        raise DataError(f"tar member {member.name!r} is a device or pipe")


def _record(kind: bytes, mode: int, name: str, data: bytes) -> bytes:
    path = name.encode("utf-8", "surrogateescape")
    return _RECORD.pack(kind, mode & 0o777, len(path), len(data)) + path + data


def records_to_tar(stream: bytes) -> bytes:
    """Turn the supervisor's records into a tar stream (owner 0, time 0).

    Raises:
        DataError: the stream ends early.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for kind, mode, name, data in iter_records(stream):
            member = tarfile.TarInfo(name)
            member.mode = mode
            if kind == b"D":
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            elif kind == b"L":
                member.type = tarfile.SYMTYPE
                member.linkname = data.decode("utf-8", "surrogateescape")
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def iter_records(stream: bytes) -> Iterator[tuple[bytes, int, str, bytes]]:
    """Yield (type, mode, path, data) of each record.

    Raises:
        DataError: the stream ends early.
    """
    at = 0
    while stream[at : at + 1] != b".":
        if len(stream) < at + _RECORD.size:
            raise DataError("the sandbox's file stream ends early")
        kind, mode, path_length, size = _RECORD.unpack_from(stream, at)
        at += _RECORD.size
        name = stream[at : at + path_length].decode("utf-8", "surrogateescape")
        data = stream[at + path_length : at + path_length + size]
        if len(data) != size:
            raise DataError("the sandbox's file stream ends early")
        yield kind, mode, name, data
        at += path_length + size


def pack_files(files: Mapping[str, bytes], *, mode: int = 0o644) -> bytes:
    """Return a tar stream of ``{relative path: content}``, for ``Sandbox.put``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def unpack_files(tar: bytes) -> dict[str, bytes]:
    """Return ``{path: content}`` of the regular files in a tar stream (``Sandbox.get``)."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                found[member.name] = file.read()
    return found
