"""An in-memory provider with scripted results, for tests of the floors above.

``FakeProvider(script)`` calls ``script(command, files)`` for every command: it returns an
``ExecResult`` or raises, and may change ``files`` (absolute path -> content), the sandbox's world.
``put`` and ``get`` work on the same dict; tar streams obey the same rules as in a real sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from skyrl_jax.core.errors import AgentCausedError, HostError, InfraError, SandboxGone
from skyrl_jax.core.protocols import ExecResult, SandboxSpec
from skyrl_jax.sandbox import wire
from skyrl_jax.sandbox.process import NO_PROGRAMS

Files = dict[str, bytes]
Script = Callable[[str | Sequence[str], Files], ExecResult]


def succeed(command: str | Sequence[str], files: Files) -> ExecResult:
    """Answer every command with code 0 and no output: the default script."""
    return ExecResult(returncode=0, output="")


class FakeProvider:
    """Counts and scripts sandboxes.

    Args:
        script: answers commands.
        create_errors: raised by the next ``create`` calls, one each (``None``: that call works).
    """

    def __init__(
        self, script: Script = succeed, *, create_errors: Sequence[HostError | None] = ()
    ) -> None:
        """Start with no sandbox."""
        self.script = script
        self.created: list[FakeSandbox] = []
        self._errors = list(create_errors)

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return sum(not box.destroyed for box in self.created)

    @property
    def program_uid(self) -> int | None:
        """``None``: nothing runs here."""
        return None

    async def __aenter__(self) -> Self:
        """Do nothing."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy every sandbox."""
        for box in self.created:
            await box.destroy()

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        """Make a sandbox, or raise the next scripted error."""
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        if spec.shared or spec.user != 1:
            raise InfraError(NO_PROGRAMS.format(backend="fake"), cause="user")
        box = FakeSandbox(spec, self.script)
        self.created.append(box)
        return box


class FakeSandbox:
    """A dict of files and a list of what was asked."""

    def __init__(self, spec: SandboxSpec, script: Script) -> None:
        """Read the layers' files, the first layer on top."""
        self.spec = spec
        self.commands: list[str | Sequence[str]] = []
        self.files: Files = {}
        self.destroyed = False
        self._script = script
        for layer in reversed(spec.layers):
            for path in sorted(Path(layer).rglob("*")):
                if path.is_file():
                    self.files["/" + str(path.relative_to(layer))] = path.read_bytes()

    def _check(self) -> None:
        if self.destroyed:
            raise SandboxGone("the sandbox is destroyed")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output_bytes: int = 65536,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Record the command and ask the script."""
        self._check()
        wire.command_args(command, timeout_s)
        self.commands.append(command)
        return self._script(command, self.files)

    async def put(self, path: str, tar: bytes) -> None:
        """Unpack a tar stream into the dict."""
        self._check()
        for kind, _, name, data in wire.iter_records(wire.tar_to_records(tar)):
            if kind == b"F":
                self.files[f"{path.rstrip('/')}/{name}"] = data

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Return a file or directory of the dict as a tar stream."""
        self._check()
        top = path.rstrip("/")
        base = top.rsplit("/", 1)[-1]
        found = {
            base + name[len(top) :]: data
            for name, data in self.files.items()
            if name == top or name.startswith(top + "/")
        }
        if not found:
            raise AgentCausedError(f"get {path}: no such path")
        if sum(map(len, found.values())) > max_bytes:
            raise AgentCausedError(f"get {path}: more than {max_bytes} bytes")
        return wire.pack_files(found)

    async def destroy(self) -> None:
        """Mark the sandbox as gone. Idempotent."""
        self.destroyed = True
