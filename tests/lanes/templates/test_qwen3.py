"""Our deltas for Qwen3 against those of PrimeIntellect's `renderers`, token for token."""

import dataclasses
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.qwen3 import Qwen3Renderer

from skyrl_jax.core.types import Message, ToolCall, ToolDef
from skyrl_jax.generation.renderer import open_renderer

BASH = ToolDef(name="bash", description="Run.", parameters={"type": "object", "properties": {}})
OPENAI_BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "Run.", "parameters": dict(BASH.parameters)},
}


@dataclasses.dataclass
class TheirTokenizer:
    """What their renderer asks of a tokenizer, by the tokenizers library."""

    library: tokenizers.Tokenizer
    name_or_path: str = "Qwen/Qwen3-8B"
    unk_token_id: int | None = None

    def encode(self, text, add_special_tokens=False):
        return self.library.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens=False):
        return self.library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            return self.library.token_to_id(tokens)
        return [self.library.token_to_id(token) for token in tokens]


@pytest.fixture(scope="session")
def folder(downloads):
    return next((downloads / "qwen3").rglob("tokenizer.json")).parent


@pytest.fixture(scope="session")
def ours(folder):
    return open_renderer(folder).with_tools([BASH])


@pytest.fixture(scope="session")
def theirs(folder):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Qwen3Renderer(TheirTokenizer(library))


def openai(message):
    """Return a message in the form their renderer reads."""
    made = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return made


# no special tokens: their renderer takes them for what they look like
TEXT = st.text(max_size=20).filter(lambda text: "<" not in text)
WORDS = st.text("abc \n.é", max_size=10).map("A{}.".format)


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=3), TEXT, WORDS, WORDS, st.booleans())
def test_what_follows_a_tool_turn(ours, theirs, results, question, thought, command, stopped):
    call = ToolCall(name="bash", arguments={"command": command})
    turn = Message(role="assistant", content="", tool_calls=(call,), reasoning=thought)
    prompt = ours.initial([Message(role="user", content=question)])
    completion = ours.answer_ids(turn)
    if not stopped:
        completion = completion[:-1]
    new = [Message(role="tool", content=text) for text in results]
    bridged = theirs.bridge_to_next_turn(
        list(prompt), list(completion), [openai(item) for item in new], tools=[OPENAI_BASH]
    )
    delta = ours.delta(new, stopped=stopped, after=turn)
    assert list(bridged.token_ids) == [*prompt, *completion, *delta]


@settings(deadline=None, max_examples=60)
@given(TEXT, st.lists(st.tuples(WORDS, WORDS, TEXT), max_size=3))
def test_whole_prompts(ours, theirs, question, rounds):
    messages = [Message(role="system", content="S"), Message(role="user", content=question)]
    for thought, command, result in rounds:
        call = ToolCall(name="bash", arguments={"command": command})
        messages += [
            Message(role="assistant", content="", tool_calls=(call,), reasoning=thought),
            Message(role="tool", content=result),
        ]
    want = theirs.render_ids(
        [openai(item) for item in messages], tools=[OPENAI_BASH], add_generation_prompt=True
    )
    assert list(ours.initial(messages)) == list(want)


def test_parsed_answers(ours, theirs):
    call = ToolCall(name="bash", arguments={"command": "ls", "n": [1, None]})
    turn = Message(role="assistant", content="Look.", tool_calls=(call,), reasoning="hm")
    ids = ours.answer_ids(turn)
    parsed = theirs.parse_response(list(ids))
    mine = ours.parse(ids, "stop")
    assert mine == turn
    assert parsed.content.strip() == mine.content and parsed.reasoning_content == mine.reasoning
    (found,) = parsed.tool_calls
    assert "bash" in json.dumps(found, default=vars)
