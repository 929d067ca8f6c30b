"""A small byte-level BPE tokenizer: trained by the job, saved as tokenizer.json, cached by corpus.

Two encoders over one vocabulary. ``encode`` is for text nobody vouches for (problem statements,
tool output): no input can become a special or markup token. ``encode_markup`` is for text we wrote
ourselves (demonstrations), where the markup of tool calls maps to its single added tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from skyrl_jax.core.errors import ConfigError, DataError

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
MARKUP = (
    "<function=str_replace_editor>\n<parameter=path>",
    "</parameter>\n<parameter=old_str>",
    "</parameter>\n<parameter=new_str>",
    "</parameter>\n</function>",
    "<function=submit>\n</function>",
    "<function=bash>\n<parameter=command>",
)
_UNKNOWN = "\ufffd".encode()
_TEXT = b"\n" + bytes(range(32, 127))
_FORMAT = "1"  # raise when training or the added tokens change, so that caches are not reused


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialToken:
    """A special token: its id, and whether it takes the white space before or after it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer:
    """Text <-> token ids.

    Exact both ways for every string and every byte sequence with a tokenizer of ours. A model's own
    may normalize text, or lack bytes that its corpus never held (SmolLM2's does): such characters
    are what the `tokenizers` library makes of them.

    Example: ``t = train(corpus, 512); t.decode(t.encode("a < b")) == "a < b"``.
    """

    def __init__(self, serialized: str) -> None:
        """Load from the text of a tokenizer.json (byte-level BPE)."""
        try:
            self._markup = tokenizers.Tokenizer.from_str(serialized)
            self._plain = tokenizers.Tokenizer.from_str(serialized)
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(f"tokenizer.json is not a tokenizers file: {error}") from error
        self._plain.encode_special_tokens = True
        for encoder in (self._markup, self._plain):  # a tokenizer.json may cut and fill
            encoder.no_truncation()
            encoder.no_padding()
        self._serialized = serialized
        self._bytes = _token_bytes(self._markup)
        self._byte_ids = {piece: i for i, piece in self._bytes.items() if len(piece) == 1}
        lacking = [chr(byte) for byte in _TEXT if bytes([byte]) not in self._byte_ids]
        if lacking:
            raise DataError(
                f"tokenizer lacks {len(lacking)} ASCII characters, the first {lacking[0]!r}; a "
                "byte-level BPE has them all"
            )
        self.vocab_size = max(self._bytes) + 1

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read a tokenizer.json."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from error

    def save(self, path: Path | str) -> None:
        """Write tokenizer.json; the file appears complete or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(self._serialized, encoding="utf-8")
        partial.replace(path)

    def token_id(self, token: str) -> int:
        """Return the id of one token by its text, e.g. ``"<|im_end|>"``."""
        found = self._markup.token_to_id(token)
        if found is None:
            raise DataError(f"tokenizer has no token {token!r}; train it with the added tokens")
        return int(found)

    def lacks(self, tokens: Sequence[str] = (START, END, *MARKUP)) -> list[str]:
        """Return those of ``tokens`` that are not special tokens here.

        A special token is one id when we write it (``encode_markup``), and never what the same
        characters in somebody else's text become (``encode``).
        """

        def special(token: str) -> bool:
            found = self.encode_markup(token)
            return len(found) == 1 and self.encode(token) != found

        return [token for token in tokens if not special(token)]

    def special_tokens(self) -> dict[str, SpecialToken]:
        """Return the special tokens by their text."""
        return {
            token.content: SpecialToken(id=number, lstrip=token.lstrip, rstrip=token.rstrip)
            for number, token in self._markup.get_added_tokens_decoder().items()
            if token.special
        }

    def encode(self, text: str) -> list[int]:
        """Encode untrusted text: special and markup strings stay ordinary characters."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_markup(self, text: str) -> list[int]:
        """Encode our own text: special and markup strings become their single tokens."""
        return list(self._markup.encode(text, add_special_tokens=False).ids)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Encode any bytes; what is no UTF-8 becomes single-byte tokens."""
        ids: list[int] = []
        while data:
            try:
                return ids + self.encode(data.decode("utf-8"))
            except UnicodeDecodeError as error:
                ids += self.encode(data[: error.start].decode("utf-8"))
                ids += self._encode_odd(data[error.start : error.end])
                data = data[error.end :]
        return ids

    def _encode_odd(self, data: bytes) -> list[int]:
        """Encode bytes that are no UTF-8, one token each; U+FFFD for a byte that has none."""
        unknown = self.encode("\ufffd")
        found = [self._byte_ids.get(bytes([byte])) for byte in data]
        return [i for one in found for i in (unknown if one is None else [one])]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the exact bytes of ``ids``; an id that names no token gives U+FFFD.

        A model's vocabulary is often padded beyond its tokenizer's, and a policy can sample such an
        id: that is its own bad output, not an error of ours.
        """
        return b"".join([self._bytes.get(i, _UNKNOWN) for i in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def cut(self, text: str, limit: int) -> str:
        """Keep the head and tail of ``text`` within ``limit`` tokens, and say how many were cut."""
        if len(text) * 4 <= limit or len(text.encode()) <= limit:  # a token holds at least a byte
            return text
        ids = self.encode(text)
        if len(ids) <= limit:
            return text
        head, tail = ids[: limit - limit // 2], ids[len(ids) - limit // 2 :]
        # a cut inside a character leaves half of it on either side: dropped, not replaced
        first, last = (self.decode_bytes(part).decode("utf-8", "ignore") for part in (head, tail))
        return f"{first}\n[{len(ids) - limit} tokens cut]\n{last}"


def train(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with the chat and markup tokens added; equal input, equal output.

    Args:
        corpus: texts, in a fixed order.
        vocab_size: upper bound of the vocabulary (tokens), added tokens and 256 bytes included.
    """
    smallest = 256 + 3 + len(MARKUP)
    if vocab_size < smallest:
        raise ConfigError(f"model.vocab_size is {vocab_size}; the tokenizer needs >= {smallest}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END, *MARKUP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return Tokenizer(tokenizer.to_str())


def load_or_train(corpus: Iterable[str], vocab_size: int, cache: Path | str) -> Tokenizer:
    """Return the tokenizer of this corpus from the folder ``cache``, training it when absent."""
    texts = list(corpus)
    digest = hashlib.sha256(json.dumps([_FORMAT, vocab_size, MARKUP, texts]).encode()).hexdigest()
    path = Path(cache) / f"tokenizer-{digest[:16]}.json"
    if path.exists():
        return Tokenizer.load(path)
    tokenizer = train(texts, vocab_size)
    tokenizer.save(path)
    return tokenizer


def _token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Map every id to its bytes: added tokens are plain text, the rest is the byte alphabet."""
    added = {i: t.content.encode() for i, t in tokenizer.get_added_tokens_decoder().items()}
    alphabet = _byte_alphabet()
    table: dict[int, bytes] = {}
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index in added:
            table[index] = added[index]
        elif all(char in alphabet for char in token):
            table[index] = bytes(alphabet[char] for char in token)
        else:
            raise DataError(f"token {index} ({token!r}) is no byte-level token")
    return table


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's printable stand-ins to bytes: printable bytes as they are, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
