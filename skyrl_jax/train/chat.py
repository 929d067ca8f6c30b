"""The form in which a run speaks with its policy: our ChatML, or its model's own chat template.

A folder with a chat template (``model.checkpoint``, then the run's copy of it) is followed; the
tokenizers that runs train have none and keep ChatML. How tool calls are read:

    codeact     in the text form that its prompt documents and the warm start teaches
    scaffolds   in the form that the template writes (generation/renderer/formats)
"""

from __future__ import annotations

from pathlib import Path

from skyrl_jax.agents.parsing import call_problem, parse_assistant
from skyrl_jax.core.config import OWN_LOOP, RunConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.generation.renderer import (
    AnyRenderer,
    ChatMLRenderer,
    TemplateRenderer,
    open_renderer,
)
from skyrl_jax.generation.renderer.folder import TEMPLATE_FILES, has_template
from skyrl_jax.generation.renderer.formats import CALL_FORMATS
from skyrl_jax.generation.renderer.matrix import check_template, summary
from skyrl_jax.generation.tokenizer import Tokenizer
from skyrl_jax.train.workdir import write_json

LOG = "template.json"


def open_chat(folder: Path, tokenizer: Tokenizer, kind: str) -> AnyRenderer:
    """Return the renderer of a run.

    Args:
        folder: holds tokenizer.json and, with a model that has a template, ``TEMPLATE_FILES``.
        tokenizer: of that folder.
        kind: ``agent.kind``.

    Raises:
        ConfigError: agents cannot work with the template; says why and what can be done.
        DataError: a file of the template is missing or damaged.
    """
    if not has_template(folder):
        return ChatMLRenderer(tokenizer, parse_assistant)
    try:
        if kind == OWN_LOOP:
            return open_renderer(
                folder, call_format="openhands", expect_calls=True, check=call_problem
            )
        renderer = open_renderer(folder)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}; {_INSTEAD}") from error
    if renderer.tool_problem:
        raise ConfigError(
            f"{folder}: agent.kind = {kind!r} calls tools, and {renderer.tool_problem}; {_INSTEAD}"
        )
    if renderer.call_format == "none":
        raise ConfigError(
            f"{folder}: agent.kind = {kind!r} calls tools, and its chat template writes calls in "
            f"no form that is known here ({', '.join(CALL_FORMATS)}); start from a model of one of "
            "these, or use agent.kind='codeact', whose calls are plain text"
        )
    return renderer


_INSTEAD = (
    "start from a model whose chat template takes tool messages, or put such a template into its "
    "chat_template.jinja (launchers/doctor.py template shows what a template can do)"
)


def check_chat(config: RunConfig) -> None:
    """Refuse a ``model.checkpoint`` whose own chat template the run's agent cannot use.

    Raises:
        ConfigError, DataError: as ``open_chat``, or the warm start speaks another form.
    """
    folder = Path(config.model.checkpoint)
    if not has_template(folder):
        return
    kind = config.agent.kind
    open_chat(folder, Tokenizer.load(folder / "tokenizer.json"), kind)
    if kind != OWN_LOOP and config.sft.max_steps:
        raise ConfigError(
            f"agent.kind = {kind!r} with the chat template of {folder}: the warm start teaches "
            "calls in our text form, not in the template's; set sft.max_steps=0"
        )


def keep_template(folder: Path, workdir: Path) -> None:
    """Copy the template of a model into the run folder; without one nothing is copied."""
    for name, data in template_files(folder).items():
        partial = workdir / f".{name}.partial"
        partial.write_bytes(data)
        partial.replace(workdir / name)


def template_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder's chat template, {} where it has none."""
    if not has_template(folder):
        return {}
    paths = [folder / name for name in TEMPLATE_FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def log_check(renderer: AnyRenderer, workdir: Path) -> str:
    """Check the template (doctor.py template), write WORKDIR/template.json, return one line."""
    verdicts = check_template(renderer.text)
    own = isinstance(renderer, TemplateRenderer)
    record = {
        "template": "the model's own" if own else "chatml",
        "call_format": renderer.call_format if isinstance(renderer, TemplateRenderer) else "text",
        "tool_problem": renderer.tool_problem if isinstance(renderer, TemplateRenderer) else "",
        "matrix": {column: verdict.value for column, verdict in verdicts.items()},
    }
    write_json(workdir / LOG, record)
    whose = f" (the model's own, calls as {record['call_format']})" if own else ""
    return f"chat template{whose}: {summary(verdicts)}"
