"""Vocabularies made by hand for tests, and BPE by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggml.runtime.vocab import Vocab


def byte_chars() -> list[str]:
    """The GPT-2 byte alphabet, byte 0 first: written out from its definition, apart from the code under test."""
    chars, n = [], 0
    for b in range(256):
        if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255:
            chars.append(chr(b))
        else:
            chars.append(chr(256 + n))
            n += 1
    return chars


def spelled(text: str) -> str:
    """`text` in the byte alphabet."""
    chars = byte_chars()
    return "".join(chars[b] for b in text.encode())


def make(tokens: Sequence[str], merges: Sequence[str] = (), pre: str = "gpt-2", types: dict[str, int] | None = None, **keys: Any) -> Vocab:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": list(tokens), "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.token_type": [(types or {}).get(t, 1) for t in tokens],
    }  # fmt: skip
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    return Vocab({key: value for key, value in metadata.items() if value is not None})


def bpe(symbols: list[str], merges: list[str]) -> list[str]:
    """BPE by its definition: join the leftmost pair of the lowest rank until none is left."""
    while len(symbols) > 1:
        pairs = [f"{a} {b}" for a, b in zip(symbols, symbols[1:], strict=False)]
        known = [merges.index(p) for p in pairs if p in merges]
        if not known:
            break
        i = pairs.index(merges[min(known)])
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]
    return symbols


def splitting(pieces: Sequence[str], pre: str) -> Vocab:
    """A vocabulary in which each piece becomes one token, and neighbours would join too if nothing kept them apart."""
    merges: list[str] = []
    for text in (*pieces, *("".join(pieces[: i + 2]) for i in range(len(pieces) - 1))):
        while len(symbols := bpe(list(spelled(text)), merges)) > 1:
            merges.append(f"{symbols[0]} {symbols[1]}")
    return make(list(dict.fromkeys([*byte_chars(), *(m.replace(" ", "") for m in merges)])), merges, pre, add_bos_token=False)


def texts(vocab: Vocab, ids: Sequence[int]) -> list[str]:
    return [vocab.token_bytes(i).decode() for i in ids]
