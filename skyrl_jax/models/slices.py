"""Why a mesh does not map onto a slice of TPU chips, and which meshes do.

The chips of a slice are wired as a grid, e.g. 2 x 4 x 4. jax lays each mesh axis along whole
dimensions of it, so that its collectives have links of their own: there 32, or 16 and 2, or 8 and
4, or 4, 4 and 2 map. 32 and 2 do not map onto 4 x 4 x 4. (On v5e alone jax cuts dimensions.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def unmapped(sizes: Mapping[str, int], devices: Sequence[Any], there: int) -> str:
    """Return what is wrong with a mesh that jax refused, and what would be right.

    Args:
        sizes: devices per mesh axis.
        devices: those of the mesh.
        there: how many devices there are.
    """
    mesh = ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)
    grid = slice_shape(devices)
    wired = "x".join(map(str, grid))
    text = f"the mesh {mesh} does not map onto the links of its {len(devices)} devices"
    if math.prod(grid) != len(devices):
        return (
            f"{text} ({devices[0].device_kind}): they are a part of {there} and no whole block of "
            f"chips (they reach over {wired}); make the product of the axes {there}, one of them -1"
        )
    splits = "; ".join(" x ".join(map(str, split)) for split in whole_splits(grid))
    return (
        f"{text} ({devices[0].device_kind}, wired as {wired}): each axis must be a product of "
        f"whole dimensions of the slice, each used once. Axes above 1 may be {splits}, in any "
        "order: set config section 'mesh' (--mesh of a plan) to one of these, or take a slice of "
        "another shape"
    )


def slice_shape(devices: Sequence[Any]) -> tuple[int, ...]:
    """Return chips per dimension of a slice, and JAX devices per chip where there are several."""
    chips = {tuple(device.coords) for device in devices}
    spans = tuple(max(along) - min(along) + 1 for along in zip(*chips, strict=True))
    cores = len(devices) // len(chips)
    return (*spans, cores) if cores > 1 else spans


def whole_splits(grid: Sequence[int]) -> list[tuple[int, ...]]:
    """Return what sizes mesh axes can have together, each a product of whole dimensions.

    Example: ``whole_splits((2, 4, 1)) == [(8,), (4, 2)]``.
    """
    found: set[tuple[int, ...]] = {()}
    for size in grid:
        if size == 1:
            continue
        grown = [(*split, size) for split in found]
        grown += [
            (*split[:at], split[at] * size, *split[at + 1 :])
            for split in found
            for at in range(len(split))
        ]
        found = {tuple(sorted(split, reverse=True)) for split in grown}
    return sorted(found, key=lambda split: (len(split), split))
