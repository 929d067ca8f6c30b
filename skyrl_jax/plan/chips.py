"""What a chip is by its public figures, and how a topology is written: v5e:4x4, gpu:8xH100-80GB.

Memory is in GiB of a chip, links in bytes per second of a chip: all its ports together, one
direction. Published TPU figures count both directions; a chip that sends s bytes and receives as
many needs at least s / (published / 2) seconds. Rings that use only some of the ports need longer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_jax.core.errors import ConfigError

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator chip.

    Args:
        name: as in a topology's text.
        hbm_gib: memory as published.
        usable_gib: what a program may use: for a TPU the compiler's own limit.
        peak_flops: bf16 FLOP/s, dense.
        link_bytes_per_s: to other chips, one direction, all ports together.
        axes: dimensions of a slice (0: no torus, a GPU).
        devices: JAX devices per chip.
        sizes: slices on offer, smallest first (numbers of GPUs for a GPU).
    """

    name: str
    hbm_gib: float
    usable_gib: float
    peak_flops: float
    link_bytes_per_s: float
    axes: int
    devices: int
    sizes: tuple[str, ...]


_SIZES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SIZES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_COUNTS = ("1", "2", "4", "8", "16", "32", "64", "128", "256")

# Memory and peak as in docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} (read in November
# 2026); links: half of "bidirectional ICI bandwidth per chip" there (v5e 400, v5p 1200, v6e 800,
# tpu7x 1200 GB/s), and for v4 six links of 50 GB/s a direction (arXiv 2304.01433, table 4).
# usable_gib: the limit that libtpu 0.0.42.1 names when it refuses a program.
_TPUS = (
    Chip(
        name="v4",
        hbm_gib=32,
        usable_gib=30.75,
        peak_flops=275 * _TERA,
        link_bytes_per_s=300 * _GIGA,
        axes=3,
        devices=1,
        sizes=_SIZES_3D,
    ),
    Chip(
        name="v5e",
        hbm_gib=16,
        usable_gib=15.75,
        peak_flops=197 * _TERA,
        link_bytes_per_s=200 * _GIGA,
        axes=2,
        devices=1,
        sizes=_SIZES_2D,
    ),
    Chip(
        name="v5p",
        hbm_gib=95,
        usable_gib=95.74,
        peak_flops=459 * _TERA,
        link_bytes_per_s=600 * _GIGA,
        axes=3,
        devices=1,
        sizes=_SIZES_3D,
    ),
    Chip(
        name="v6e",
        hbm_gib=32,
        usable_gib=31.25,
        peak_flops=918 * _TERA,
        link_bytes_per_s=400 * _GIGA,
        axes=2,
        devices=1,
        sizes=_SIZES_2D,
    ),
    Chip(
        name="tpu7x",
        hbm_gib=192,
        usable_gib=189.5,
        peak_flops=2307 * _TERA,
        link_bytes_per_s=600 * _GIGA,
        axes=3,
        devices=2,
        sizes=_SIZES_3D,
    ),
)


def _gpu(name: str, gib: float, peak: float, nvlink: float) -> Chip:
    # Nine tenths: CUDA's context, NCCL's buffers and fragments take the rest.
    return Chip(
        name=name,
        hbm_gib=gib,
        usable_gib=0.9 * gib,
        peak_flops=peak * _TERA,
        link_bytes_per_s=nvlink * _GIGA,
        axes=0,
        devices=1,
        sizes=_COUNTS,
    )


# NVIDIA's data sheets of the SXM boards: dense bf16 peak, and half of the NVLink total.
_GPUS = (
    _gpu("A100-40GB", 40, 312, 300),
    _gpu("A100-80GB", 80, 312, 300),
    _gpu("H100-80GB", 80, 989, 450),
    _gpu("H200-141GB", 140, 989, 450),
    _gpu("B200-180GB", 180, 2250, 900),
)
# Beyond one board of eight, one 400 Gbit/s network port per GPU.
GPU_BOARD = 8
GPU_NETWORK_BYTES_PER_S = 50 * _GIGA


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Chips that one job gets. ``text`` is how a person writes it."""

    text: str
    chip: Chip
    num_chips: int

    @property
    def is_tpu(self) -> bool:
        """Whether its own compiler can be asked (else the figures are an estimate)."""
        return self.chip.axes > 0

    @property
    def num_devices(self) -> int:
        """JAX devices in all."""
        return self.num_chips * self.chip.devices

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes per second that a chip sends, at most."""
        if not self.is_tpu and self.num_chips > GPU_BOARD:
            return GPU_NETWORK_BYTES_PER_S
        return self.chip.link_bytes_per_s


def parse_topology(text: str) -> Topology:
    """Return the topology that a text names.

    Raises:
        ConfigError: an unknown kind of chip (the known ones are named) or a shape that no slice
            of it has.
    """
    kind, colon, shape = text.partition(":")
    if kind == "gpu":
        return _parse_gpus(text, shape)
    chip = _find(kind, text)
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ConfigError(f"topology {text!r} has no shape; write e.g. {_example(chip)}")
    sizes = [int(n) for n in shape.split("x")]
    if len(sizes) != chip.axes:
        raise ConfigError(
            f"topology {text!r}: a slice of {kind} has {chip.axes} dimensions; write e.g. "
            f"{_example(chip)}"
        )
    return Topology(text=text, chip=chip, num_chips=math.prod(sizes))


def ladder(text: str) -> Iterator[Topology]:
    """Return the topologies a search goes through: of one kind, smallest first.

    Args:
        text: a kind alone ("v5p", "gpu:H100-80GB"), or one topology, which is then the only one.

    Raises:
        ConfigError: as ``parse_topology``.
    """
    kind, colon, rest = text.partition(":")
    if kind == "gpu" and not re.match(r"\d+x", rest):
        chip = _find_gpu(rest, text)
        return (parse_topology(f"gpu:{size}x{chip.name}") for size in chip.sizes)
    if colon:
        return iter((parse_topology(text),))
    chip = _find(kind, text)
    return (parse_topology(f"{kind}:{size}") for size in chip.sizes)


def _parse_gpus(text: str, shape: str) -> Topology:
    found = re.fullmatch(r"([1-9]\d*)x(.+)", shape)
    if not found:
        name = re.sub(r"^0*x", "", shape) or _GPUS[0].name
        raise ConfigError(f"topology {text!r}: write the number of GPUs, e.g. gpu:8x{name}")
    chip = _find_gpu(found[2], text)
    return Topology(text=text, chip=chip, num_chips=int(found[1]))


def _find(kind: str, text: str) -> Chip:
    for chip in _TPUS:
        if chip.name == kind:
            return chip
    examples = ", ".join(_example(chip) for chip in _TPUS)
    raise ConfigError(
        f"topology {text!r} is unknown; known: {examples}, gpu:8x"
        + ", gpu:8x".join(chip.name for chip in _GPUS)
    )


def _find_gpu(name: str, text: str) -> Chip:
    for chip in _GPUS:
        if chip.name == name:
            return chip
    known = ", ".join(chip.name for chip in _GPUS)
    raise ConfigError(f"topology {text!r}: no GPU is called {name!r}; known: {known}")


def _example(chip: Chip) -> str:
    return f"{chip.name}:{chip.sizes[3]}"
