"""Snapshots of a sandbox's working directory, on every backend that keeps the contract.

A snapshot is what the commands left in ``workdir``, as a tar; a restored sandbox is a fresh one of
the same spec whose ``workdir`` holds exactly that. Processes, /tmp and what lies elsewhere are not
part of it: an episode's state is its tree.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field

from skyrl_jax.core.errors import InfraError
from skyrl_jax.core.protocols import Sandbox, SandboxProvider, SandboxSpec

MAX_BYTES = 256 << 20
_EMPTY_TIMEOUT_S = 120.0
# The mode of the directory itself is the image's; what is in it belongs to the commands' uid.
_EMPTY = "find . -mindepth 1 -delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What lay in a sandbox's ``workdir``. Example: ``await provider_snapshots.restore(snapshot)``.

    Args:
        spec: of the sandbox it was taken from.
        tar: of the directory, under its own name.
    """

    spec: SandboxSpec
    tar: bytes = field(repr=False)


class FileSnapshots:
    """Snapshots for a provider (see ``core.protocols.Snapshotting``).

    Args:
        provider: makes the restored sandboxes.
        max_bytes: of one snapshot.
    """

    def __init__(self, provider: SandboxProvider, max_bytes: int = MAX_BYTES) -> None:
        """Keep the provider."""
        self._provider = provider
        self._max_bytes = max_bytes

    async def snapshot(self, box: Sandbox, spec: SandboxSpec) -> Snapshot:
        """Take the working directory of a sandbox as it is now.

        Args:
            box: of this provider; no command of it may run.
            spec: what it was made of.

        Raises:
            AgentCausedError: the tree is larger than ``max_bytes``, or the commands removed it.
            SandboxGone, InfraError: as ``Sandbox.get``.
        """
        return Snapshot(spec=spec, tar=await box.get(spec.workdir, max_bytes=self._max_bytes))

    async def restore(self, snapshot: Snapshot) -> Sandbox:
        """Make a sandbox that has the snapshot's tree; any number of them may be made of one.

        Raises:
            CapacityError, ImageError, InfraError: as ``SandboxProvider.create``; also where the
                image's own files in ``workdir`` cannot be replaced.
        """
        spec = snapshot.spec
        box = await self._provider.create(spec)
        try:
            done = await box.exec(_EMPTY, cwd=spec.workdir, timeout_s=_EMPTY_TIMEOUT_S)
            if done.returncode:
                raise InfraError(
                    f"{spec.workdir} cannot be emptied for a snapshot: {done.output[-500:]}",
                    cause="snapshot",
                )
            await box.put(posixpath.dirname(spec.workdir.rstrip("/")) or "/", snapshot.tar)
        except BaseException:
            await box.destroy()
            raise
        return box
