"""The container images of real rows: had and made ready before anything is graded or trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from skyrl_jax.core.errors import ConfigError, DataError, HostError
from skyrl_jax.core.protocols import SandboxProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.image_prepare import Prepared
from skyrl_jax.sandbox.image_store import ImageStore
from skyrl_jax.tasks.swe.image_names import row_image
from skyrl_jax.tasks.swe.repo import WORKDIR
from skyrl_jax.tasks.swe.rows import SweRow


def image_store(provider: SandboxProvider) -> ImageStore:
    """Return the images of a provider.

    Raises:
        ConfigError: its sandboxes are not made of container images.
    """
    inner = getattr(provider, "inner", provider)  # below a warm pool
    if not isinstance(inner, DockerProvider):
        raise ConfigError(
            "the rows' own container images need sandbox.backend = 'docker'; with another backend "
            "leave --images out, and near releases from PyPI serve as trees"
        )
    return inner.images


async def ready_images(
    rows: Sequence[SweRow],
    provider: SandboxProvider,
    on_done: Callable[[str, Prepared], None] = lambda name, found: None,
) -> dict[str, Prepared]:
    """Return {instance id: its image made ready, or why there is none}.

    Args:
        rows: of a data set whose images have names (tasks/swe/image_names.py).
        provider: of docker sandboxes.
        on_done: called after each.

    Raises:
        ConfigError: see ``image_store``.
    """
    store = image_store(provider)

    async def one(row: SweRow) -> tuple[str, Prepared]:
        try:
            made = await store.prepare(
                row_image(row), workdir=f"/{WORKDIR}", commit=row.base_commit
            )
        except (DataError, HostError) as error:
            made = Prepared(image="", why_not=str(error))
        on_done(row.instance_id, made)
        return row.instance_id, made

    return dict(await asyncio.gather(*(one(row) for row in rows)))
