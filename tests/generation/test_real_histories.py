"""What clients do to histories, by the tokenizers and templates of real models.

The sessions and the judgement are those of tests/gateway/test_conversation_property.py, whose own
tokenizer is a toy: a replayed turn goes on from the sampled ids whatever they are, a changed one
forks, and every sampled token is trained once or counted.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from skyrl_jax.core.types import Message
from skyrl_jax.gateway.conversation import Conversation
from skyrl_jax.generation.renderer import TemplateRenderer, open_renderer
from tests.gateway.talk import TOOLS, Talk
from tests.gateway.test_conversation_property import MOVES, Client, check

MODELS = ("qwen3", "llama3", "llama3_1", "smollm2")
SESSIONS, LENGTH = 12, 25


@pytest.fixture(scope="module")
def renderers(qwen3, llama3, smollm2, trl_templates, tmp_path_factory):
    """Each model by its own template, and Llama 3.1's tokenizer by the template with tools."""
    file = tmp_path_factory.mktemp("llama") / "llama3_1.jinja"
    file.write_text(trl_templates["llama3_1"])
    return {
        "qwen3": open_renderer(qwen3),
        "llama3": open_renderer(llama3),
        "llama3_1": open_renderer(llama3, template=file),
        "smollm2": open_renderer(smollm2),
    }


class RealTalk(Talk):
    """A session by a real renderer."""

    def __init__(self, renderer: TemplateRenderer, offered: TemplateRenderer) -> None:
        super().__init__(Conversation(lambda tools: offered if tools else renderer))
        self.renderer = renderer

    def parse(self, ids: tuple[int, ...], finish: str) -> Message:
        return self.renderer.parse(ids, finish)


@dataclass
class RealClient(Client):
    """Samples what encodes to itself, what a text would be split into otherwise, and any ids."""

    splits: int = 0

    def sample(self, whole: bool) -> tuple[int, ...]:
        self.words += 1
        renderer = self.talk.renderer
        book = renderer.tokenizer
        thought = f"<think>\nt{self.words}\n</think>\n\n" if self.chance.random() < 0.5 else ""
        text = f"{thought}Alla{self.words} "
        kind = self.chance.choice(("own", "letters", "any"))
        ids = list(book.encode_markup(text))
        if kind == "letters":
            ids = [i for char in text for i in book.encode(char)]
            self.splits += ids != list(book.encode_markup(text))
        elif kind == "any":
            drawn = (self.chance.randrange(book.vocab_size) for _ in range(3))
            ids += [i for i in drawn if i not in renderer.stop_token_ids]
        return (*ids, renderer.stop_id) if whole else tuple(ids)


@pytest.mark.parametrize("name", MODELS)
def test_sampled_ids_stay_and_every_token_is_trained_once_or_counted(renderers, name) -> None:
    renderer = renderers[name]
    offered = renderer.with_tools(TOOLS)
    causes: Counter[str] = Counter()
    splits = continued = 0
    for seed in range(SESSIONS):
        chance = random.Random(seed)
        client = RealClient(chance, talk=RealTalk(renderer, offered))
        for _ in range(LENGTH):
            client.play(chance.choice(MOVES))
        causes += check(client)
        splits += client.splits
        continued += len(client.used)
    assert set(causes) >= {"branch", "compaction", "content", "edit", "new", "retry", "system"}
    assert splits > SESSIONS and continued > 5 * SESSIONS
