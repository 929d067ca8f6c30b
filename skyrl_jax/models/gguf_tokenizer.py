"""The tokenizer inside a GGUF file -> tokenizer.json and tokenizer_config.json of an HF folder.

Byte-level BPE alone (``tokenizer.ggml.model`` "gpt2"): its tokens and merges are in the file. How
text is cut into words before merging is there only by name (``tokenizer.ggml.pre``).
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.models.gguf_file import GgufFile

# tokenizer.ggml.token_type: text, and two kinds that are matched before text is cut into words
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# HF's name in config.json -> key behind "tokenizer.ggml."
_SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}


def special_ids(file: GgufFile) -> dict[str, int]:
    """Return the ids of the special tokens that the file names, by their key in config.json."""
    found = {ours: file.value(f"tokenizer.ggml.{key}", int, -1) for ours, key in _SPECIAL.items()}
    return {name: number for name, number in found.items() if number >= 0}


def tokenizer_files(file: GgufFile, max_length: int) -> dict[str, bytes]:
    """Return {"tokenizer.json": ..., "tokenizer_config.json": ...} of a GGUF file.

    The chat template, where the file has one, is in tokenizer_config.json.

    Args:
        file: the open file.
        max_length: positions of the model, tokens.

    Raises:
        ConfigError: a kind of tokenizer that is not read.
        WeightsError: a key is missing, or tokens, merges and ids do not fit together.
    """
    kind = file.value("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ConfigError(f"{file.path} has tokenizer.ggml.model {kind!r}; known: gpt2 (BPE)")
    if file.value("tokenizer.ggml.add_bos_token", bool, False):
        raise ConfigError(f"{file.path} sets tokenizer.ggml.add_bos_token, which is not read here")
    tokens = file.value("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for name, number in special_ids(file).items():
        if number >= len(tokens):
            raise WeightsError(f"{file.path}: {name} is {number}, of {len(tokens)} tokens")
        config[name.removesuffix("_id")] = tokens[number]
    template = file.value("tokenizer.chat_template", str, "")
    if template:
        config["chat_template"] = template
    return {
        "tokenizer.json": _tokenizer(file, tokens).to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=1, sort_keys=True).encode(),
    }


def _tokenizer(file: GgufFile, tokens: list[str]) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in file.value("tokenizer.ggml.merges", list)]
    kinds = file.value("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens):
        raise WeightsError(
            f"{file.path}: tokenizer.ggml.tokens holds {len(tokens)} tokens, {len(vocabulary)} of "
            f"them different, and tokenizer.ggml.token_type {len(kinds)}; the three must be equal"
        )
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the Rust side raises bare Exception
        raise WeightsError(
            f"{file.path}: tokenizer.ggml.merges do not fit the tokens: {error}"
        ) from error
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    # They are in the vocabulary already, and keep their ids: this tells how they are matched.
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens([_added(token) for token, k in pairs if k == _CONTROL])
    tokenizer.add_tokens([_added(token) for token, k in pairs if k == _USER_DEFINED])
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _pre_tokenizer(file: GgufFile) -> Any:
    name = file.value("tokenizer.ggml.pre", str, "gpt-2")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)  # cuts by GPT-2's rule
    digits = pre_tokenizers.Digits(individual_digits=True)
    known = {"gpt-2": words, "smollm": pre_tokenizers.Sequence([digits, words])}
    if name not in known:
        raise ConfigError(
            f"{file.path} has tokenizer.ggml.pre {name!r} (the rule that cuts text into words); "
            f"known: {', '.join(known)}"
        )
    return known[name]
