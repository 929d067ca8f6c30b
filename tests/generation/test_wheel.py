"""The deltas of the field's templates: each opens or says why not, and continues what it wrote."""

from __future__ import annotations

import re

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.generation.renderer import ChatTemplate, TemplateRenderer
from skyrl_jax.generation.tokenizer import Tokenizer

CALL = (ToolCall(name="bash", arguments={"command": "ls"}),)
USER = Message(role="user", content="Question.")
SPOKEN = Message(role="assistant", content="Answer.")
CALLED = Message(role="assistant", content="Answer.", tool_calls=CALL)
RESULT = Message(role="tool", content="Result.")
# Their contents are lists of parts, which these messages are not.
VISION = {"idefics3", "llava_next", "smolvlm"}
# No role for tools; the first results of a conversation written otherwise (DeepSeek); results left
# out (Phi-3) or put before the assistant's words (Gemma 4).
NO_TOOLS = {
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma", "gemma3",
    "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "phi3", "phi3_5",
}  # fmt: skip
NAMED = r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<\|?[a-z_]+\|?>|\[gMASK\]|</s>"


def tokenizer(source: str) -> Tokenizer:
    """Return a tokenizer of single bytes with the special tokens that a template writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = {name for name in re.findall(NAMED, source) if re.search("[|\uff5c]|turn>|/s>", name)}
    made.add_special_tokens(sorted(found | {"<eos>", "<bos>", "[gMASK]"}))
    return Tokenizer(made.to_str())


def continued(renderer: TemplateRenderer, turn: Message, new: Message) -> bool:
    """Whether a long conversation ends in what the delta says."""
    delta = renderer.delta([new], stopped=False, after=turn)
    rounds = [turn, RESULT] if turn.tool_calls else [turn, USER]
    whole = renderer.render([USER, *rounds, *rounds, turn, new])
    return whole[-len(delta) :] == delta and len(delta) > 2


def test_every_template_opens_or_says_why_and_continues_its_own_text(trl_templates) -> None:
    refused, without_tools, wrong = set(), set(), set()
    for name, source in trl_templates.items():
        stem = name.removesuffix("_training")
        made = ChatTemplate(source, specials={"bos_token": "<bos>", "eos_token": "<eos>"})
        options = {"call_format": "none", "reasoning_format": "none", "stop_tokens": ["<eos>"]}
        try:
            renderer = TemplateRenderer(made, tokenizer(source), **options)
        except ConfigError:
            refused.add(stem)
            continue
        if not continued(renderer, SPOKEN, USER):
            wrong.add(name)
        if renderer.tool_problem:
            without_tools.add(stem)
        elif not continued(renderer, CALLED, RESULT):
            wrong.add(name)
    assert (refused, without_tools, wrong) == (VISION, NO_TOOLS, set())
