"""Starting a run from a Hugging Face folder (``model.checkpoint``): weights and tokenizer.

    config.json + *.safetensors + tokenizer.json, e.g. RUN/weights/hf/v000010 of another run

The folder is checked whole, by its headers, before anything of the run is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError, DataError, WeightsError
from skyrl_jax.generation.renderer.folder import has_template
from skyrl_jax.generation.tokenizer import Tokenizer
from skyrl_jax.models.hf_config import check_same_model
from skyrl_jax.models.hf_read import Reader, load_sharded

TOKENIZER = "tokenizer.json"


def check_pretrained(model: ModelConfig) -> None:
    """Refuse a ``model.checkpoint`` that a run cannot start from; reads no tensor.

    Raises:
        ConfigError: no such folder, or config.json is a model that this decoder does not compute.
        WeightsError: config.json is not the model of the config, or the tensors are not that
            model's.
        DataError: as ``pretrained_tokenizer``.
    """
    folder = Path(model.checkpoint)
    if not folder.is_dir():
        raise ConfigError(
            f"model.checkpoint = {model.checkpoint!r}: there is no such folder; it must be a "
            "Hugging Face folder on this machine (config.json, *.safetensors, tokenizer.json), "
            "e.g. RUN/weights/hf/v000010 of another run; '' starts from fresh weights"
        )
    check_same_model(model, folder, whose="config section 'model'")
    Reader(folder, model)
    pretrained_tokenizer(model)


def pretrained_tokenizer(model: ModelConfig) -> Tokenizer:
    """Return the tokenizer of ``model.checkpoint``.

    Raises:
        DataError: there is none, it has more tokens than the model, or the folder has no chat
            template of its own and the tokenizer lacks tokens of the agent's markup.
    """
    path = Path(model.checkpoint) / TOKENIZER
    if not path.is_file():
        raise DataError(
            f"{path} is missing: a policy speaks the tokens it was trained with; copy the "
            "tokenizer.json of its run there"
        )
    tokenizer = Tokenizer.load(path)
    lacking = [] if has_template(path.parent) else tokenizer.lacks()
    if lacking:
        raise DataError(
            f"{path} has no special token {', '.join(map(repr, lacking))}: turns and tool calls "
            "are marked up with such tokens; start from a folder that a run of this program wrote "
            "(RUN/weights/hf/vNNNNNN), or from one with its model's own chat template "
            "(chat_template.jinja, or chat_template in tokenizer_config.json)"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"{path} has {tokenizer.vocab_size} tokens, model.vocab_size is {model.vocab_size}: "
            "it is another model's tokenizer"
        )
    return tokenizer


def load_pretrained(model: ModelConfig, shardings: Any = None) -> Any:
    """Return the fp32 params of ``model.checkpoint``.

    Args:
        model: its shape.
        shardings: a sharding per leaf, or ``None`` for one device.

    Raises:
        WeightsError: as ``check_pretrained``, or a tensor holds NaN or infinity: a step made of it
            would be skipped, and the next, to the end of the run.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from skyrl_jax.models.decoder import abstract_params

    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: here, abstract_params(model))
    params = load_sharded(model.checkpoint, model, shardings, dtype=np.float32)
    finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(params)
    for group, leaves in finite.items():
        for name, fine in leaves.items():
            if not fine:
                raise WeightsError(
                    f"model.checkpoint = {model.checkpoint!r}: leaf {group}.{name} holds values "
                    "that are not finite; such weights compute nothing"
                )
    return params
