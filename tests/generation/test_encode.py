"""Rendered text becomes the library's own ids, and nobody else's text becomes a special token."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from skyrl_jax.core.errors import DataError
from skyrl_jax.generation.renderer.encode import Encoder, well_formed
from skyrl_jax.generation.tokenizer import END, MARKUP, PAD, START, Tokenizer
from tests.actor.fakes import make_tokenizer

TOKENIZER = make_tokenizer()
ENCODER = Encoder(TOKENIZER)
SPECIAL_IDS = {TOKENIZER.token_id(t) for t in (PAD, START, END, *MARKUP)}
PIECES = [START, END, MARKUP[0], MARKUP[4], "<", "|im_end|>", "\ue000", "\ue000\ue000", "\n", "é"]
CONTENT = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=6).map("".join)


@settings(deadline=None)
@given(CONTENT, CONTENT)
def test_guarded_text_holds_no_special_token_and_comes_back_whole(one, two) -> None:
    value = {"a": [one, {"b": two}], "n": 3, "none": None}
    guarded, mark = ENCODER.guard(value)
    one_in, two_in = guarded["a"][0], guarded["a"][1]["b"]
    ids = ENCODER.encode(f"{START}{one_in}{END}\n{two_in}", mark)
    assert TOKENIZER.decode(ids) == f"{START}{one}{END}\n{two}"
    assert [i for i in ids if i in SPECIAL_IDS] == [TOKENIZER.token_id(t) for t in (START, END)]
    if not mark:
        assert guarded == value
        assert ids == TOKENIZER.encode_markup(f"{START}{one}{END}\n{two}")


def test_a_template_that_writes_ascii_json_spells_the_mark_out() -> None:
    guarded, mark = ENCODER.guard([f"a {END} é"])
    ids = ENCODER.encode(json.dumps(guarded) + END, mark)
    assert TOKENIZER.decode(ids) == json.dumps([f"a {END} é"]) + END
    assert ids.count(TOKENIZER.token_id(END)) == 1


def test_special_tokens_that_take_white_space_take_it_in_marked_text_too() -> None:
    """Phi-3's <|end|> swallows the newline behind it."""
    made = _letters(AddedToken("<|end|>", rstrip=True), AddedToken("<|u|>", lstrip=True))
    made.add_tokens([AddedToken("<think>")])
    encoder = Encoder(Tokenizer(made.to_str()))
    text = "<|u|>a<think> <|end|>\n \tb <|u|> c<|end|>  "
    want = made.encode(text, add_special_tokens=False).ids
    assert encoder.encode(text) == want
    assert encoder.encode(text, "\ue000") == want  # as it goes where something was marked
    assert made.token_to_id("<think>") in want


def _letters(*special: AddedToken) -> tokenizers.Tokenizer:
    """Return a tokenizer of single bytes with these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def test_a_thought_of_an_assistant_is_cut_out_by_templates_and_so_not_broken_up() -> None:
    made = _letters(AddedToken("<think>"), AddedToken("</think>"), AddedToken("<|e|>"))
    encoder = Encoder(Tokenizer(made.to_str()))
    text = "<think>a</think>b<|e|>"
    own, other = ({"role": role, "content": text} for role in ("assistant", "tool"))
    (own, other), mark = encoder.guard([own, other])
    assert own["content"] == f"<think>a</think>b<{mark}|e|>"
    assert other["content"] == f"<{mark}think>a<{mark}/think>b<{mark}|e|>"
    ids = encoder.encode(f"<think>{other['content']}", mark)
    assert [i for i in ids if i >= 256] == [made.token_to_id("<think>")]


def test_a_tokenizer_file_that_cuts_and_fills_is_told_not_to() -> None:
    made = _letters(AddedToken("<|e|>"))
    made.enable_truncation(2)
    made.enable_padding(length=9)
    tokenizer = Tokenizer(made.to_str())
    assert tokenizer.decode(tokenizer.encode("abcde")) == "abcde"
    assert tokenizer.decode(tokenizer.encode_markup("abcde<|e|>")) == "abcde<|e|>"


def test_a_tokenizer_that_lacks_odd_bytes_is_taken_and_one_that_lacks_letters_is_not() -> None:
    made = _letters()
    vocabulary = made.get_vocab()
    for char in ("\xff", "q"):
        del vocabulary[char]
        made.model = models.BPE(vocab=vocabulary, merges=[])
        if char == "\xff":
            tokenizer = Tokenizer(made.to_str())
            assert tokenizer.decode(tokenizer.encode_bytes(b"a\xffb")) == "a\ufffdb"
            assert tokenizer.encode_bytes(b"a\xfeb") != tokenizer.encode_bytes(b"a\xffb")
    with pytest.raises(DataError, match="lacks 1 ASCII characters, the first 'q'"):
        Tokenizer(made.to_str())


def test_lone_surrogates_are_replaced() -> None:
    assert well_formed("a\ud800b") == "a\ufffdb"
    assert well_formed("\ud83d\ude00") == "\U0001f600"
    assert TOKENIZER.decode(ENCODER.encode("a\ud800")) == "a\ufffd"


@pytest.mark.parametrize("name", ["qwen3", "llama3", "smollm2"])
def test_real_tokenizers_encode_as_the_library_does(name, request) -> None:
    folder = request.getfixturevalue(name)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    encoder = Encoder(tokenizer)
    names = list(tokenizer.special_tokens())
    first, last = names[0], names[-1]
    text = f"{first}user\nAdd 345 <think>naïve</think> <tool_call>\n{last}\n\n  x"
    assert encoder.encode(text) == library.encode(text, add_special_tokens=False).ids
    guarded, mark = encoder.guard([text])
    assert mark
    ids = encoder.encode(f"{first}{guarded[0]}{last}", mark)
    special = {token.id for token in tokenizer.special_tokens().values()}
    assert [i for i in ids if i in special] == [ids[0], ids[-1]]
    assert tokenizer.decode(ids) == f"{first}{text}{last}"
