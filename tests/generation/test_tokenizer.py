"""The tiny tokenizer: exact both ways, deterministic, and no text of others becomes markup."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.generation.tokenizer import END, MARKUP, PAD, START, Tokenizer, load_or_train, train
from tests.actor.fakes import CORPUS, make_tokenizer

TOKENIZER = make_tokenizer()
SPECIAL_IDS = {TOKENIZER.token_id(t) for t in (PAD, START, END, *MARKUP)}
TEXT = st.text() | st.lists(
    st.sampled_from([START, END, *MARKUP, "\n", " ", "é", "return", "\U0001f600"]) | st.text()
).map("".join)


@settings(deadline=None)
@given(TEXT)
def test_text_round_trips_by_both_encoders(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode(TOKENIZER.encode_markup(text)) == text


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_round_trip(data: bytes) -> None:
    assert TOKENIZER.decode_bytes(TOKENIZER.encode_bytes(data)) == data


@settings(deadline=None)
@given(TEXT)
def test_untrusted_text_never_becomes_special_tokens(text: str) -> None:
    assert not SPECIAL_IDS & set(TOKENIZER.encode(text))


def test_own_text_uses_one_token_per_markup_piece() -> None:
    for piece in (START, END, *MARKUP):
        assert TOKENIZER.encode_markup(piece) == [TOKENIZER.token_id(piece)]
        assert len(TOKENIZER.encode(piece)) > 1


def test_what_is_no_special_token_is_named() -> None:
    assert TOKENIZER.lacks() == []
    word = next(t for t in ("return", "def", "re") if len(TOKENIZER.encode_markup(t)) == 1)
    assert TOKENIZER.lacks([word, START, "<tool_call>"]) == [word, "<tool_call>"]


def test_every_id_decodes_and_an_id_of_no_token_is_a_replacement_character() -> None:
    everything = TOKENIZER.decode_bytes(range(TOKENIZER.vocab_size))
    assert START.encode() in everything
    assert TOKENIZER.vocab_size <= 400
    known = TOKENIZER.encode("a")
    assert TOKENIZER.decode([*known, 99999, *known]) == "a\ufffda"


def test_training_is_deterministic_and_cached_by_corpus(tmp_path) -> None:
    first = load_or_train(CORPUS, 400, tmp_path)
    assert train(CORPUS, 400)._serialized == first._serialized
    (cached,) = tmp_path.iterdir()
    stamp = cached.stat().st_mtime_ns
    assert load_or_train(iter(CORPUS), 400, tmp_path).encode("return a") == first.encode("return a")
    assert cached.stat().st_mtime_ns == stamp
    load_or_train([*CORPUS, "more"], 400, tmp_path)
    load_or_train(CORPUS, 380, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_save_and_load(tmp_path) -> None:
    TOKENIZER.save(tmp_path / "sub" / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "sub" / "tokenizer.json")
    text = f"a{END}b{MARKUP[3]}"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.encode_markup(text) == TOKENIZER.encode_markup(text)
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["tokenizer.json"]
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(DataError, match="not a tokenizers file"):
        Tokenizer("{}")


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 100"):
        train(CORPUS, 100)


def test_cut_keeps_head_and_tail_and_states_what_it_cut() -> None:
    text = "".join(chr(0x4E00 + i) for i in range(50))  # 3 bytes, 3 tokens each
    cut = TOKENIZER.cut(text, 21)
    head, note, tail = cut.split("\n")
    assert text.startswith(head) and text.endswith(tail) and len(head) >= 3 and len(tail) >= 3
    assert note == "[129 tokens cut]"  # 150 - 21
    assert "�" not in cut
    assert TOKENIZER.cut("return a", 8) == "return a"
    with_merges = "return a < b" * 3  # more bytes than the limit, fewer tokens
    assert TOKENIZER.cut(with_merges, 30) == with_merges
