"""How many parameters a model has."""

from __future__ import annotations

import math

import jax

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.models.decoder import abstract_params


def count_params(model: ModelConfig) -> int:
    """Return the number of parameters, from the shapes that training uses."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(model)))
