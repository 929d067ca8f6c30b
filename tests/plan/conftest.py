"""A plan of a tiny model: the quick start's config, smaller, and one that is compiled for a TPU."""

import dataclasses
import importlib.util

import pytest

from configs.swe import get_config
from skyrl_jax.core.config import parse_config
from skyrl_jax.plan.chips import parse_topology
from skyrl_jax.plan.job import make_job


@pytest.fixture(scope="session")
def make_plan():
    """Return make_plan(topology, rows=, seq_len=, remat=, mesh=, **model keys) -> PlanJob."""
    config = parse_config(get_config("quickstart").to_dict())

    def make(topology, *, rows=4, seq_len=64, remat="full", mesh=None, dtype="bfloat16", **model):
        changed = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, **model),
            learner=dataclasses.replace(config.learner, compute_dtype=dtype),
        )
        return make_job(
            changed, parse_topology(topology), rows=rows, seq_len=seq_len, remat=remat, mesh=mesh
        )

    return make


@pytest.fixture(scope="session")
def tpu_compiler():
    """The TPU compiler; its absence is a set-up fault, no skip."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.fail(
            "libtpu is missing: run the tests by `make test`, which installs the extra plan"
        )
