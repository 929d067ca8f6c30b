"""Read the chat template and the special tokens of a Hugging Face folder.

tokenizer.json          the tokenizer
tokenizer_config.json   chat_template (text, or a list of named ones), bos_token, eos_token, ...
chat_template.jinja     the template, where it is a file of its own
generation_config.json  eos_token_id: the ids at which generation ends, one or several
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import ToolCall, ToolDef
from skyrl_jax.generation.renderer.formats import guess_call_format
from skyrl_jax.generation.renderer.rendered import TemplateRenderer
from skyrl_jax.generation.renderer.template import ChatTemplate
from skyrl_jax.generation.tokenizer import Tokenizer

# What a template is read from, beside tokenizer.json.
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json")
# Names for templates that are read without a tokenizer.
STAND_INS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}


def open_renderer(
    folder: Path | str,
    *,
    template: Path | str | None = None,
    tools: Sequence[ToolDef] = (),
    call_format: str = "",
    reasoning_format: str = "",
    variables: Mapping[str, Any] | None = None,
    expect_calls: bool = False,
    check: Callable[[ToolCall], str | None] | None = None,
) -> TemplateRenderer:
    """Open the renderer of a model.

    Args:
        folder: a Hugging Face folder, or the path of its tokenizer.json.
        template: a template file that is used instead of the folder's.
        tools: what the model is offered.
        call_format: "" = the one that the template writes.
        reasoning_format: "" = "think" where the template knows ``</think>``.
        variables: of the template.
        expect_calls: see ``TemplateRenderer``.
        check: see ``TemplateRenderer``.

    Raises:
        ConfigError: there is no template, or it cannot be used (see ``TemplateRenderer``).
        DataError: a file is missing or damaged.
    """
    folder = Path(folder)
    if folder.is_file():
        folder = folder.parent
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    made = read_template(folder, template)
    return TemplateRenderer(
        made,
        tokenizer,
        tools=tools,
        call_format=call_format or guess_call_format(made.source),
        reasoning_format=reasoning_format or ("think" if "</think>" in made.source else "none"),
        variables=variables,
        stop_tokens=_stop_tokens(folder, made.specials, tokenizer),
        expect_calls=expect_calls,
        check=check,
    )


def has_template(folder: Path) -> bool:
    """Whether a Hugging Face folder has a chat template of its own.

    Raises:
        DataError: tokenizer_config.json is damaged.
    """
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_chosen(_read_json(path).get("chat_template")))


def read_template(folder: Path | None, template: Path | str | None = None) -> ChatTemplate:
    """Return the template of a folder, or of a file with the folder's special tokens.

    Args:
        folder: of a tokenizer; ``None``: special tokens get stand-in names.
        template: a file with a template.

    Raises:
        ConfigError: neither has a template, or it is no jinja2.
        DataError: a file is missing or damaged.
    """
    config = _read_json(folder / "tokenizer_config.json") if folder else {}
    specials = _special_tokens(config) if folder else STAND_INS
    if template is not None:
        return ChatTemplate(_read_text(Path(template)), specials=specials)
    assert folder is not None, "a folder or a file"
    own = folder / "chat_template.jinja"
    source = _read_text(own) if own.is_file() else _chosen(config.get("chat_template"))
    if not source:
        raise ConfigError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); name a template file"
        )
    return ChatTemplate(source, specials=specials)


def _chosen(value: Any) -> str:
    """Return the template of a config's value: a text, or one of several named ones."""
    if isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict):
            named[str(item.get("name"))] = str(item.get("template") or "")
    return named.get("tool_use") or named.get("default") or ""


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{"bos_token": "<s>", ...}``: a token is written as text or as an object."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _stop_tokens(folder: Path, specials: Mapping[str, str], tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens at which generation ends, as text."""
    path = folder / "generation_config.json"
    ids = _read_json(path).get("eos_token_id") if path.is_file() else None
    wanted = set(ids if isinstance(ids, list) else [ids])
    known = tokenizer.special_tokens()
    found = [specials["eos_token"]] if specials.get("eos_token") in known else []
    return [*found, *(text for text, token in known.items() if token.id in wanted)]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the chat template {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} must hold a JSON object")
    return value
