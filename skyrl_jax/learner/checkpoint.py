"""Checkpoints: the train state and the host's own state in one folder that appears at once.

    ROOT/000012/{state/, host/}      an Orbax CheckpointManager step; renamed into place when whole

The host part is JSON: data cursor, random state, counters, token ledger, config fingerprint, and
per leaf of the state its shape, dtype and the sum of its bits (computed inside jit), so that a
checkpoint that was damaged on disk is noticed when it is read, whatever damaged it.

Several processes write and read one checkpoint together: each its own shards, process 0 the host
part. They read on their own and then agree on the host whether all could, since one that found
damage must not leave the others waiting in a barrier.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from skyrl_jax.core.errors import CheckpointError
from skyrl_jax.learner.distributed import Peers
from skyrl_jax.learner.export import bit_sums, leaf_name

Host = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that could not be used. ``moved_to`` is where it lies now."""

    step: int
    reason: str
    moved_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What ``Checkpoints.restore`` found; ``skipped`` lists the newer ones it had to pass over."""

    step: int
    state: Any
    host: Host
    skipped: tuple[Skipped, ...]


class Checkpoints:
    """The checkpoints of one run. Use as a context manager.

    Saving is synchronous: when ``save`` returns, the checkpoint is whole and visible; when it
    raises or the process dies, the earlier ones are untouched.

    Args:
        root: the folder; made if absent. All processes must see the same one.
        keep: how many checkpoints stay.
        peers: the other processes of the learner, which make the same calls in the same order.
    """

    def __init__(self, root: str | Path, *, keep: int, peers: Peers | None = None) -> None:
        """Remember the arguments; nothing is touched before ``__enter__``."""
        self.root = Path(root).absolute()
        self._keep = keep
        self._peers = peers or Peers()
        self._manager: Any = None
        self._reader: Any = None

    def __enter__(self) -> Checkpoints:
        """Start the manager; leftovers of writes that died are removed.

        Raises:
            CheckpointError: the folder cannot be used.
            ConfigError: the processes do not see the same folder.
        """
        try:
            if self._peers.index == 0:
                self.root.mkdir(parents=True, exist_ok=True)
                self._sweep()
            self._peers.check_shared(self.root)
            self._open()
        except OSError as error:
            raise CheckpointError(f"cannot open checkpoint folder {self.root}: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the manager."""
        self._close()

    def steps(self) -> list[int]:
        """Return the steps on disk, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Write one checkpoint.

        Args:
            step: its number; one that exists is replaced.
            state: a pytree of arrays (TrainState).
            host: JSON-able values.

        Raises:
            CheckpointError: the disk is full or refuses the write; the last good one stays.
        """
        from orbax import checkpoint as ocp

        leaves = _describe(state, bit_sums(state))
        body = {"host": dict(host), "leaves": leaves}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            host=ocp.args.JsonSave(body | {"crc32": _crc(body)}),
        )
        try:
            with _quiet():
                # A replayed step was made from the same inputs: the copy on disk goes first.
                if step in self._manager.all_steps():
                    self._manager.delete(step)
                self._manager.save(step, args=args, force=True)
                self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            self._give_up(step, error)

    def restore(self, template: Any) -> Restored | None:
        """Return the newest checkpoint that is whole, or ``None`` when there is none at all.

        A damaged one is moved aside (``damaged-<step>``) so that its step can be written again.

        Args:
            template: pytree of arrays or ShapeDtypeStructs with the wanted shardings
                (``learner.state.abstract_state``); a leaf without one comes back on one device.

        Raises:
            CheckpointError: checkpoints exist but none can be used, or the newest whole one
                belongs to a model of another shape.
        """
        skipped: list[Skipped] = []
        for step in reversed(self._peers.gather("steps on disk", self.steps())[0]):
            try:
                host, state = self._read(step, template)
            except _DamagedError as error:
                skipped.append(self._move_aside(step, str(error)))
                continue
            if skipped:
                self._open()  # the manager remembers the steps that were moved
            return Restored(step=step, state=state, host=host, skipped=tuple(skipped))
        if skipped:
            causes = "; ".join(f"step {s.step}: {s.reason}" for s in skipped)
            raise CheckpointError(
                f"no checkpoint in {self.root} can be used ({causes}); start with a new workdir "
                "or bring one back from a copy"
            )
        return None

    def _read(self, step: int, template: Any) -> tuple[Host, Any]:
        document: dict[str, Any] = {}
        state: Any = None
        reason = ""
        try:
            document, state = self._read_own(step, template)
        except _DamagedError as error:
            reason = str(error)
        reasons = self._peers.gather(f"checkpoint {step} is read", reason)
        if any(reasons):
            raise _DamagedError(next(filter(None, reasons)))
        found = _describe(state, bit_sums(state))
        bad = [name for name, entry in document["leaves"].items() if found[name] != entry]
        if bad:
            raise _DamagedError(f"the bits of {bad[0]} are not those that were saved")
        return document["host"], state

    def _read_own(self, step: int, template: Any) -> tuple[dict[str, Any], Any]:
        """Read the host part and the shards of this process."""
        from orbax import checkpoint as ocp

        document = self._read_host(step)
        _check_shapes(step, document["leaves"], template)
        template = jax.tree.map(_somewhere, template)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(template))
        # Orbax and tensorstore raise many types on a broken file; all mean the same here.
        state = _guarded(
            "its state cannot be read", lambda: self._reader.restore(step, args=args)["state"]
        )
        check_placed(step, state, template)
        return document, state

    def _read_host(self, step: int) -> dict[str, Any]:
        from orbax import checkpoint as ocp

        args = ocp.args.Composite(host=ocp.args.JsonRestore())
        document: dict[str, Any] = _guarded(
            "its host state cannot be read", lambda: self._reader.restore(step, args=args)["host"]
        )
        body = {key: document.get(key) for key in ("host", "leaves")}
        if document.get("crc32") != _crc(body):
            raise _DamagedError("its host state is not what was saved")
        return body

    def _open(self) -> None:
        self._close()
        if self._peers.count == 1:
            self._manager = self._reader = _make_manager(self.root, max_to_keep=self._keep)
            return
        everyone, alone = range(self._peers.count), [self._peers.index]
        self._manager = _make_manager(self.root, everyone, max_to_keep=self._keep)
        self._reader = _make_manager(self.root, alone, read_only=True)

    def _close(self) -> None:
        for manager in {id(m): m for m in (self._manager, self._reader) if m is not None}.values():
            manager.close()

    def _sweep(self) -> None:
        """Remove what writes that died have left."""
        for path in self.root.iterdir():
            if ".orbax-checkpoint-tmp" in path.name:
                shutil.rmtree(path, ignore_errors=True)

    def _give_up(self, step: int, error: Exception) -> None:
        """Remove what a failed save left, and say what is wrong."""
        if self._peers.count == 1:  # others may still be writing, until this process has ended
            self._sweep()
            self._open()
        text = str(error)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
        cause = f"the disk under {self.root} is full" if full else text.splitlines()[0][:300]
        good = self.steps()
        stays = f"the last good one is step {good[-1]}" if good else "there is no earlier one"
        raise CheckpointError(f"cannot write checkpoint {step}: {cause}; {stays}") from error

    def _move_aside(self, step: int, reason: str) -> Skipped:
        target = self.root / f"damaged-{step:06d}"
        if self._peers.index == 0:
            shutil.rmtree(target, ignore_errors=True)
            (self.root / f"{step:06d}").rename(target)
        self._peers.ready(f"checkpoint {step} is moved aside")
        return Skipped(step=step, reason=reason, moved_to=str(target))


class _DamagedError(CheckpointError):
    """This checkpoint cannot be used; an older one may."""


def _make_manager(root: Path, members: Sequence[int] = (), **options: Any) -> Any:
    """Return an Orbax manager of the processes ``members``; of the only one where there are none.

    With members it waits for them at barriers on the host that have a time limit; by default at
    collectives without one.
    """
    from orbax import checkpoint as ocp

    class Manager(ocp.CheckpointManager):  # type: ignore[misc]
        def reached_preemption(self, step: int) -> bool:
            return False  # our own loop asks, with numbers of its own (Peers.stop_requested)

    processes = ocp.options.MultiprocessingOptions()
    if members:
        processes = ocp.options.MultiprocessingOptions(
            primary_host=members[0], active_processes=set(members)
        )
    return Manager(
        root,
        options=ocp.CheckpointManagerOptions(
            enable_async_checkpointing=False,
            step_prefix=None,
            step_format_fixed_length=6,
            create=False,
            multiprocessing_options=processes,
            **options,
        ),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back Orbax's log of every sub-step while one of its calls runs."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _guarded(what: str, read: Callable[[], Any]) -> Any:
    try:
        with _quiet():
            return read()
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:200]
        raise _DamagedError(f"{what} ({type(error).__name__}: {text})") from error


def _crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _describe(state: Any, sums: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return {leaf: [dtype, shape, bit sum]}."""
    return {
        leaf_name(path): [str(leaf.dtype), list(leaf.shape), sums[leaf_name(path)]]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _check_shapes(step: int, leaves: Mapping[str, list[Any]], template: Any) -> None:
    wanted = {
        leaf_name(path): [str(leaf.dtype), list(leaf.shape)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(template)
    }
    saved = {name: entry[:2] for name, entry in leaves.items()}
    for name in sorted(set(wanted) | set(saved)):
        if wanted.get(name) != saved.get(name):
            raise CheckpointError(
                f"checkpoint {step} belongs to another model or optimizer: {name} is "
                f"{saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} in the config"
            )


def _somewhere(leaf: Any) -> Any:
    """Return a template leaf with a sharding: without one Orbax takes the saved devices' layout."""
    if getattr(leaf, "sharding", None) is not None:
        return leaf
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    struct: Any = jax.ShapeDtypeStruct  # ships no types
    return struct(leaf.shape, leaf.dtype, sharding=one)


def check_placed(step: int, state: Any, template: Any) -> None:
    """Refuse arrays that lie elsewhere than asked: one leaf left whole can fill a device."""
    found = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), wanted in zip(found, jax.tree.leaves(template), strict=True):
        place = getattr(wanted, "sharding", None)
        if place is not None and not leaf.sharding.is_equivalent_to(place, leaf.ndim):
            raise CheckpointError(
                f"checkpoint {step}: {leaf_name(path)} was restored as {leaf.sharding}, wanted "
                f"{place}; restore with a template of ShapeDtypeStructs that have the shardings"
            )
