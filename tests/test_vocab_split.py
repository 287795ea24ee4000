"""Pre-tokenizers: where a text is cut before merges are applied, against hand-made answers and the regex module."""

from __future__ import annotations

import random

import pytest
from vocabs import bpe, byte_chars, make, spelled, splitting, texts

from pyggml.runtime.vocab import Vocab

LLAMA3_PIECES = [
    ("12345678", ["123", "456", "78"]),
    ("I'LL", ["I", "'LL"]),
    ("don't", ["don", "'t"]),
    ("I'Ve we'RE it'S", ["I", "'Ve", " we", "'RE", " it", "'S"]),
    ("\r\n\r\n", ["\r\n\r\n"]),
    ("a \n b", ["a", " \n", " b"]),
    ("  x", [" ", " x"]),
    ("\t\t", ["\t\t"]),
    ("\t\tx", ["\t", "\tx"]),
    ("\t\t1", ["\t", "\t", "1"]),
    (" 12", [" ", "12"]),
    ("a1b", ["a", "1", "b"]),
    ("(x) != _y", ["(x", ")", " !=", " _", "y"]),
    ("x!\n\ny", ["x", "!\n\n", "y"]),
    ("end  ", ["end", "  "]),
    ("\u00a0x", ["\u00a0x"]),
]
GPT2_PIECES = [
    ("12345678", ["12345678"]),
    ("I'LL", ["I", "'", "LL"]),
    ("don't", ["don", "'t"]),
    ("\r\n\r\n", ["\r\n\r\n"]),
    ("  x", [" ", " x"]),
    ("\t\tx", ["\t", "\t", "x"]),
    (" 12", [" 12"]),
    ("(x) !=", ["(", "x", ")", " !="]),
    ("x!\n\ny", ["x", "!", "\n", "\n", "y"]),
    ("\u00a0x", ["\u00a0", "x"]),
]
DEFAULT_PIECES = [
    ("12345678", ["123", "456", "78"]),
    ("I'LL", ["I", "'", "LL"]),
    ("don't", ["don", "'", "t"]),
    ("a 1234", ["a", " ", "123", "4"]),
    ("x  !=y", ["x", "  ", "!=", "y"]),
    ("a~b+c", ["a", "~", "b", "+", "c"]),
    ("\u0663\u0664\u0665\u0666", ["\u0663\u0664\u0665\u0666"]),
]
UNICODE_PIECES = [
    ("dbrx", "\u2029 \ua3e4", ["\u2029", " \ua3e4"]),
    ("gpt-2", "\u2029 \ua3e4", ["\u2029", " \ua3e4"]),
    ("dbrx", "x\u00b2", ["x", "\u00b2"]),
    ("dbrx", "\u00b2\u2167\u00bd3", ["\u00b2\u2167\u00bd", "3"]),
    ("gpt-2", "\u00b2\u2167\u00bd3", ["\u00b2\u2167\u00bd3"]),
    ("default", "\u00b2\u2167\u00bd3", ["\u00b2\u2167\u00bd3"]),
    ("dbrx", "\u00e9t\u00e9", ["\u00e9t\u00e9"]),
    ("dbrx", "e\u0301t", ["e", "\u0301t"]),
    ("gpt-2", "e\u0301t", ["e", "\u0301", "t"]),
    ("dbrx", "a\x1c\x1db", ["a", "\x1c\x1d", "b"]),  # no White_Space, whatever str.isspace says
    ("dbrx", "a\u2028\u2028b", ["a", "\u2028", "\u2028b"]),
]


@pytest.mark.parametrize("pre", ["dbrx", "llama-bpe", "llama3", "llama-v3"])
@pytest.mark.parametrize(("text", "pieces"), LLAMA3_PIECES, ids=[f"f89-{t!a}" for t, _ in LLAMA3_PIECES])
def test_llama3_split(pre: str, text: str, pieces: list[str]) -> None:
    vocab = splitting(pieces, pre)
    assert texts(vocab, vocab.tokenize(text)) == pieces


@pytest.mark.parametrize(("text", "pieces"), GPT2_PIECES, ids=[ascii(t) for t, _ in GPT2_PIECES])
def test_gpt2_split(text: str, pieces: list[str]) -> None:
    vocab = splitting(pieces, "gpt-2")
    assert texts(vocab, vocab.tokenize(text)) == pieces


@pytest.mark.parametrize(("text", "pieces"), DEFAULT_PIECES, ids=[ascii(t) for t, _ in DEFAULT_PIECES])
def test_default_split(text: str, pieces: list[str]) -> None:
    vocab = splitting(pieces, "default")
    assert texts(vocab, vocab.tokenize(text)) == pieces


@pytest.mark.parametrize(("pre", "text", "pieces"), UNICODE_PIECES, ids=[f"f91-{p}-{t!a}" for p, t, _ in UNICODE_PIECES])
def test_unicode_split(pre: str, text: str, pieces: list[str]) -> None:
    vocab = splitting(pieces, pre)
    assert texts(vocab, vocab.tokenize(text)) == pieces


@pytest.mark.parametrize("pre", ["gpt-2", "dbrx", "llama-bpe", "default"])
def test_fault_90_merges_stay_inside_pre_tokens(pre: str) -> None:
    merges = ["o ,", ", Ġ", "Ġ w"]
    vocab = make([*byte_chars(), "o,", ",Ġ", "Ġw"], merges, pre, add_bos_token=False)
    assert texts(vocab, vocab.tokenize("hello, world")) == [*"hello", ",", " w", *"orld"]


def test_missing_pre_is_default() -> None:
    vocab = Vocab({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*byte_chars(), "12"], "tokenizer.ggml.merges": ["1 2"]})
    assert vocab.pre == "default"
    assert texts(vocab, vocab.tokenize("x 12")) == ["x", " ", "12"]


@pytest.mark.parametrize(
    ("alias", "pieces"),
    [("smaug-bpe", [" ", "12", "'LL"]), ("lfm2", [" ", "12", "'LL"]), ("falcon-h1", [" ", "12", "'LL"]), ("pixtral", [" ", "12", "'LL"]),
     ("olmo", [" 12", "'", "LL"]), ("granite-docling", [" 12", "'", "LL"]), ("exaone4", [" 12", "'", "LL"])],
)  # fmt: skip
def test_other_names(alias: str, pieces: list[str]) -> None:
    vocab = splitting(pieces, alias)
    assert texts(vocab, vocab.tokenize(" 12'LL")) == pieces


def oracle_splits(pre: str, text: str) -> list[str]:
    """The pre-tokens by the `regex` module, from the patterns of the models' own tokenizer files."""
    regex = pytest.importorskip("regex")
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    llama3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
    patterns = {"gpt-2": [gpt2], "dbrx": [llama3], "llama-bpe": [llama3], "default": [r"[\p{P}$+<=>^~|]+", gpt2, r"\p{N}+", "[0-9]{3}"]}[pre]
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


@pytest.mark.parametrize("pre", ["gpt-2", "dbrx", "llama-bpe", "default"])
def test_random_merges_against_plain_bpe(pre: str) -> None:
    """Random merge tables and texts: split by the regex module, merged by the definition of BPE."""
    rng = random.Random(pre)
    chars = "aabbs1239 \n\t'!.,éñ²中👍\u0301\u00a0\r"
    for _ in range(20):
        merges: list[str] = []
        symbols = [spelled(c)[:1] for c in chars] + [byte_chars()[b] for b in "é中".encode()]
        for _ in range(60):
            a, b = rng.choice(symbols), rng.choice(symbols)
            if a + b not in symbols:
                merges.append(f"{a} {b}")
                symbols.append(a + b)
        tokens = list(dict.fromkeys([*byte_chars(), *symbols]))
        vocab = make(tokens, merges, pre, add_bos_token=False)
        for _ in range(20):
            text = "".join(rng.choices(chars, k=rng.randrange(40)))
            expected: list[str] = []
            for piece in oracle_splits(pre, text):
                whole = spelled(piece)
                expected += [whole] if pre == "llama-bpe" and whole in tokens else bpe(list(whole), merges)
            assert vocab.tokenize(text) == [tokens.index(t) for t in expected], text


def test_ignore_merges_takes_a_whole_pre_token() -> None:
    """llama-bpe alone: a pre-token in the vocabulary is taken even if no merge makes it."""
    tokens = [*byte_chars(), "abc", "ab", "Ġabc"]
    llama = make(tokens, ["a b"], "llama-bpe", add_bos_token=False)
    assert texts(llama, llama.tokenize("abc abc abcd")) == ["abc", " abc", " ", "ab", "c", "d"]
    dbrx = make(tokens, ["a b"], "dbrx")
    assert texts(dbrx, dbrx.tokenize("abc")) == ["ab", "c"]
