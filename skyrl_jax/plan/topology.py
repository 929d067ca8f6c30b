"""A topology's devices without its hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.plan.chips import Topology


def open_devices(topology: Topology) -> Sequence[Any]:
    """Return the devices to compile for: a TPU's own, or as many CPU devices as GPUs.

    Raises:
        ConfigError: libtpu does not know the topology (in its own words).
    """
    if not topology.is_tpu:
        return jax.devices("cpu")
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # as jobs see it: a chip's two cores as one device
    if topology.num_chips == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]  # else a host has four, and one is no slice
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.text, **options)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"libtpu makes no topology {topology.text!r}: {' '.join(str(error).split())[:300]}"
        ) from None
    return found.devices


def devices_per_chip(devices: Sequence[Any]) -> int:
    """Return how many JAX devices share a chip: those with equal coordinates.

    A v4 or v5p chip is one device of two cores; a v2, v3 or tpu7x chip shows each core.
    """
    if not hasattr(devices[0], "coords"):
        return 1
    chips = {tuple(device.coords) for device in devices}
    return len(devices) // len(chips)
