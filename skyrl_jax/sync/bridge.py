"""Server side of the weight bridge: a complete version folder -> every generation server.

    load, check against the manifest -> HF safetensors on local disk -> per server: close the gate,
    pause(abort), poll flush_cache, update_weights_from_disk, read the echo in /model_info,
    continue, probe by prompt log-probs, open the gate.

A probe that fails keeps the gate shut, puts the last good version back on the server and raises.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import GenerationError, WeightsError
from skyrl_jax.core.types import WeightVersion
from skyrl_jax.generation.sglang import SGLangGenerator
from skyrl_jax.models import hf
from skyrl_jax.sync.publish import Restorer, leaves
from skyrl_jax.weights.store import PARAMS, FolderStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A version as the servers read it: the HF folder and the probe they must pass."""

    number: int
    folder: Path
    probe: Mapping[str, Any]


class Bridge:
    """Carry versions from a store to servers; an async context manager.

    Args:
        store: where versions are published.
        servers: their clients (open already); their gates belong to the bridge.
        scratch: local folder for HF exports; the newest and the last good one are kept.
        hf_config: further config.json keys for the servers (eos_token_id, ...).
        files: further files of the HF folder, e.g. ``{"tokenizer.json": ...}``.
        deadline_s: of one update over all servers.
    """

    def __init__(
        self,
        store: FolderStore,
        servers: Sequence[SGLangGenerator],
        scratch: Path | str,
        *,
        hf_config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        deadline_s: float = 300.0,
    ) -> None:
        self._store = store
        self._servers = list(servers)
        self._scratch = Path(scratch)
        self._hf_config = dict(hf_config or {})
        self._files = dict(files or {})
        self._deadline_s = deadline_s
        self._good: Exported | None = None
        self._single_flight = asyncio.Lock()
        self._restorer = Restorer()

    async def __aenter__(self) -> Bridge:
        """Return self."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close the checkpointer."""
        self._restorer.__exit__(*exc)

    @property
    def acknowledged(self) -> int | None:
        """The version that every server last proved to serve."""
        return None if self._good is None else self._good.number

    async def update(self, version: WeightVersion) -> dict[str, float]:
        """Put ``version`` on every server; return the seconds of each stage.

        Raises:
            WeightsError: the version's files or params are not what was published.
            GenerationError: a server refused it, failed the probe or did not do it in time. Its
                gate stays shut; the last good version was put back on every server where that was
                possible (not after the deadline).
        """
        async with self._single_flight:
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await self._update(version)
            except TimeoutError as error:
                raise GenerationError(
                    f"weight version {version.number} was not on every server within "
                    f"{self._deadline_s:g} s",
                    cause="engine_update",
                ) from error

    async def _update(self, version: WeightVersion) -> dict[str, float]:
        start = time.monotonic()
        exported = await asyncio.to_thread(self.export, version)
        middle = time.monotonic()
        await self._to_all(exported)
        self._drop_exports(exported)
        self._good = exported
        for server in self._servers:
            server.open_gate()
        return {"export_s": middle - start, "update_s": time.monotonic() - middle}

    def export(self, version: WeightVersion) -> Exported:
        """Check a version against its manifest and write it as a HF folder.

        Raises:
            WeightsError: files or params are not what was published, or the disk is full.
        """
        from safetensors import SafetensorError

        manifest = self._store.manifest(version)
        cfg = ModelConfig(**manifest["model"])
        try:
            params = self._restorer.restore(version.path / PARAMS, manifest)
        except (ValueError, OSError, KeyError) as error:
            raise WeightsError(
                f"cannot restore weight version {version.number}: {error}"
            ) from error
        _check(params, manifest, version.number)
        try:
            folder = hf.save_hf(
                self._scratch / version.path.name,
                cfg,
                params,
                extra_config=self._hf_config,
                files=self._files,
            )
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"cannot write weight version {version.number} as a HF folder under "
                f"{self._scratch}: {error}"
            ) from error
        return Exported(number=version.number, folder=folder, probe=manifest["probe"])

    async def _to_all(self, exported: Exported) -> None:
        for server in self._servers:
            server.close_gate()
        outcomes = await asyncio.gather(
            *(put_on_server(server, exported) for server in self._servers), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures:
            return
        note = await self._roll_back()
        first = failures[0]
        if not isinstance(first, GenerationError):
            raise first
        raise GenerationError(
            f"weight version {exported.number} is not served: {first}; {note}; the gate stays shut",
            cause=first.cause,
        ) from first

    async def _roll_back(self) -> str:
        if self._good is None:
            return "there is no earlier version to go back to"
        good = self._good
        outcomes = await asyncio.gather(
            *(put_on_server(server, good) for server in self._servers), return_exceptions=True
        )
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            return f"going back to version {good.number} failed too ({failed[0]})"
        return f"version {good.number} is back on every server"

    def _drop_exports(self, newest: Exported) -> None:
        keep = {newest.folder.name}
        if self._good is not None:
            keep.add(self._good.folder.name)
        for path in self._scratch.iterdir():
            if path.is_dir() and path.name.startswith("v") and path.name not in keep:
                shutil.rmtree(path, ignore_errors=True)


async def put_on_server(server: SGLangGenerator, exported: Exported) -> None:
    """Load a version on one server and prove that it is the one served.

    Raises:
        GenerationError: a call failed, the echo names another version, or the probe differs.
    """
    server.close_gate()
    await server.pause()
    await server.flush()
    await server.update_weights(str(exported.folder.absolute()), exported.number)
    echo = (await server.model_info()).get("weight_version")
    if echo != str(exported.number):
        raise GenerationError(
            f"{server.base_url} echoes weight version {echo!r} after loading {exported.number}",
            cause="engine_update",
        )
    await server.resume()
    got = await server.prompt_logprobs(exported.probe["input_ids"])
    wanted = exported.probe["logprobs"]
    worst = float(np.max(np.abs(np.asarray(got) - np.asarray(wanted))))
    if not worst <= exported.probe["tolerance"]:  # written so that NaN fails
        raise GenerationError(
            f"{server.base_url} serves version {exported.number} but its probe log-probs are off "
            f"by {worst:.3g} nats (allowed {exported.probe['tolerance']:g})",
            cause="engine_probe",
        )


def host_bit_sum(array: np.ndarray) -> int:
    """Return what ``learner.export.bit_sum`` gives, without a device."""
    words = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    return int(words.sum(dtype=np.uint64)) & 0xFFFFFFFF


def _check(params: Any, manifest: dict[str, Any], number: int) -> None:
    for name, leaf in leaves(params):
        facts = manifest["leaves"][name]
        seen = {"shape": list(leaf.shape), "dtype": leaf.dtype.name, "bit_sum": host_bit_sum(leaf)}
        if seen != facts:
            raise WeightsError(
                f"weight version {number}: leaf {name} is {json.dumps(seen)}, the learner "
                f"published {json.dumps(facts)}"
            )
