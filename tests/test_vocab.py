"""Vocabularies: the trained demo vocabulary against two reference tokenizers, hand-made ones against hand-made answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabs import byte_chars, make, texts

from pyggml.errors import FormatError, ModelError, ParamError
from pyggml.runtime.vocab import StreamDetokenizer, Vocab

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
DEMO = ROOT / "models/demo/granite-h-demo-Q8_0.gguf"
GOLDENS = json.loads((ROOT / "tests/data/tokenizer-goldens.json").read_text(encoding="utf-8"))["rows"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SPECIAL_TEXT = st.lists(st.one_of(ANY_TEXT, st.just("<|endoftext|>"))).map("".join)

check = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def demo_metadata() -> dict[str, Any]:
    """The metadata of the bundled model, as the gguf package reads it."""
    return {key: field.contents() for key, field in GGUFReader(DEMO).fields.items()}


@pytest.fixture(scope="module")
def demo(demo_metadata: dict[str, Any]) -> Vocab:
    return Vocab(demo_metadata)


# The trained vocabulary


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{i}") for i, row in enumerate(GOLDENS)])
def test_golden_strings(demo: Vocab, row: dict[str, Any]) -> None:
    """The ids of Hugging Face tokenizers, of llama-tokenize and of llama_tokenize, with and without special tokens."""
    ids = demo.tokenize(row["text"], add_special=False, parse_special=True)
    assert ids == row["hf"] == row["llama_cli"] == row["llama_special"]
    plain = demo.tokenize(row["text"], add_special=False, parse_special=False)
    assert plain == row.get("llama_nospecial", row["llama_special"])
    assert demo.detokenize(ids) == demo.detokenize(plain) == row["text"]


def test_golden_strings_are_all_there() -> None:
    assert len(GOLDENS) == 210


def test_attributes(demo: Vocab) -> None:
    assert (demo.n_vocab, demo.pre) == (2048, "gpt-2")
    assert (demo.bos_id, demo.eos_id, demo.eot_id, demo.pad_id) == (0, 0, 0, 0)
    assert (demo.add_bos, demo.add_eos) == (False, False)
    assert demo.eog_ids == frozenset({0})
    assert demo.is_special(0) and not demo.is_special(1)
    assert demo.token_bytes(0) == b"<|endoftext|>"
    assert demo.token_bytes(221) == b" " and demo.token_bytes(199) == b"\n"
    assert repr(demo) == "Vocab(gpt-2, 2048 tokens, bos 0, eos 0)"


@check
@given(text=SPECIAL_TEXT, parse_special=st.booleans())
def test_fault_92_round_trip_of_any_text(demo: Vocab, text: str, parse_special: bool) -> None:
    assert demo.detokenize(demo.tokenize(text, parse_special=parse_special)) == text


@pytest.mark.parametrize("pre", ["gpt-2", "dbrx", "llama-bpe", "default"])
@pytest.mark.parametrize(
    "text",
    ["", " ", "a", "\n", "😀", "<|x|>a", "".join(map(chr, range(256))), "e\u0301", "a  b   c", " lead and trail ", "\x00", "\ufeff\ufffe\uffff"],
    ids=["empty", "space", "a", "newline", "emoji", "special", "latin1", "combining", "spaces", "edges", "nul", "bom"],
)
def test_fault_92_round_trip(pre: str, text: str) -> None:
    vocab = make([*byte_chars(), "<|x|>"], pre=pre, types={"<|x|>": 3}, add_bos_token=False)
    for parse_special in (False, True):
        ids = vocab.tokenize(text, parse_special=parse_special)
        assert vocab.detokenize(ids) == text
        # byte tokens alone: the ids are the bytes, so nothing was added in front and nothing was normalized
        assert (256 in ids) == (parse_special and "<|x|>" in text)
        assert [i for i in ids if i < 256] == list((text.replace("<|x|>", "") if parse_special else text).encode())


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same tokenizer as Hugging Face `tokenizers` reads it from the model's own folder."""
    from tokenizers import Tokenizer

    path = SHARED / "models/hf/granite-h-demo/tokenizer.json"
    if not path.exists():
        pytest.skip("needs ../shared/models/hf")
    return Tokenizer.from_file(str(path))


def test_a_novel_against_hugging_face(demo: Vocab, reference: Any) -> None:
    text = (SHARED / "models/heldout.txt").read_text(encoding="utf-8")
    ids = demo.tokenize(text, parse_special=True)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert demo.detokenize(ids) == reference.decode(ids, skip_special_tokens=False) == text


@check
@given(text=SPECIAL_TEXT)
def test_any_text_against_hugging_face(demo: Vocab, reference: Any, text: str) -> None:
    assert demo.tokenize(text, parse_special=True) == reference.encode(text, add_special_tokens=False).ids


# Special tokens


@pytest.fixture(scope="module")
def chat() -> Vocab:
    """Control, user-defined and unknown tokens over bytes; some overlap or contain each other."""
    types = {"<s>": 3, "</s>": 3, "<think>": 4, "<think>x": 4, "ab>": 3, "<<s>": 4, "<unk>": 2, "WORD": 3}
    return make([*byte_chars(), *types], pre="llama-bpe", types=types, bos_token_id=256, eos_token_id=257)


@pytest.mark.parametrize(
    ("text", "parse_special", "expected"),
    [
        ("<s>", True, ["<s>"]),
        ("<s>", False, [*"<s>"]),
        ("a<think>b", False, ["a", "<think>", "b"]),
        ("a<think>xb", False, ["a", "<think>x", "b"]),
        ("<think><think>x<think>", True, ["<think>", "<think>x", "<think>"]),
        ("<<s>", True, ["<<s>"]),
        ("<unk>", True, ["<unk>"]),
        ("<unk>", False, [*"<unk>"]),
        ("WORD", False, [*"WORD"]),
        ("WORD", True, ["WORD"]),
        (" WORD WORD", False, [*" WORD WORD"]),
    ],
)
def test_special_tokens_in_text(chat: Vocab, text: str, parse_special: bool, expected: list[str]) -> None:
    ids = chat.tokenize(text, add_special=False, parse_special=parse_special)
    assert texts(chat, ids) == expected
    assert chat.detokenize(ids) == text


def test_the_longest_special_token_wins_wherever_it_is() -> None:
    """llama.cpp cuts at the longest token first, so the later one wins here, not the leftmost."""
    vocab = make([*byte_chars(), "ab", "bcd"], types={"ab": 4, "bcd": 4})
    assert texts(vocab, vocab.tokenize("abcd ab")) == ["a", "bcd", " ", "ab"]
    by_bytes = make([*byte_chars(), "abc", "é中"], types={"abc": 4, "é中": 4})  # 3 characters but 3 bytes, against 5 bytes
    assert texts(by_bytes, by_bytes.tokenize("abcé中")) == ["abc", "é中"]


def test_skip_special(chat: Vocab) -> None:
    ids = chat.tokenize("<s>a<think><unk></s>", add_special=False, parse_special=True)
    assert chat.detokenize(ids) == "<s>a<think><unk></s>"
    assert chat.detokenize(ids, skip_special=True) == "a<think>"
    assert [chat.is_special(i) for i in ids] == [True, False, False, True, True]


BOS = 256


@pytest.mark.parametrize(
    ("pre", "add_bos", "text", "parse_special", "expected"),
    [
        pytest.param("gpt-2", True, "a", False, [BOS, 97], id="f93-true"),
        pytest.param("gpt-2", False, "a", False, [97], id="f93-false"),
        pytest.param("gpt-2", None, "a", False, [97], id="f93-absent-gpt2"),
        pytest.param("dbrx", None, "a", False, [97], id="f93-absent-dbrx"),
        pytest.param("default", None, "a", False, [97], id="f93-absent-default"),
        pytest.param("llama-bpe", None, "a", False, [BOS, 97], id="f93-absent-llama-bpe"),
        pytest.param("llama-bpe", False, "a", False, [97], id="f93-false-llama-bpe"),
        pytest.param("gpt-2", np.True_, "a", False, [BOS, 97], id="f93-numpy-bool"),
        pytest.param("gpt-2", True, "", False, [BOS], id="f93-empty-text"),
        pytest.param("gpt-2", True, "<s>a", True, [BOS, 97], id="f93-text-has-bos"),
        pytest.param("gpt-2", True, "a<s>", True, [BOS, 97, BOS], id="f93-bos-later"),
        pytest.param("gpt-2", True, "<s>", False, [BOS, *b"<s>"], id="f93-text-is-plain"),
        pytest.param("gpt-2", False, "<s>a", True, [BOS, 97], id="f93-false-but-in-text"),
    ],
)
def test_add_bos(pre: str, add_bos: bool | None, text: str, parse_special: bool, expected: list[int]) -> None:
    vocab = make([*byte_chars(), "<s>"], pre=pre, types={"<s>": 3}, bos_token_id=BOS, add_bos_token=add_bos)
    assert vocab.tokenize(text, parse_special=parse_special) == expected
    in_text = [BOS, 97] if text == "<s>a" else [97, BOS] if text == "a<s>" else list(text.encode())
    assert vocab.tokenize(text, add_special=False, parse_special=parse_special) == in_text


def test_fault_93_no_default_bos_without_an_id() -> None:
    vocab = make(byte_chars(), pre="llama-bpe")
    assert (vocab.bos_id, vocab.add_bos) == (None, False)
    assert vocab.tokenize("a") == [97]


def test_add_eos() -> None:
    vocab = make([*byte_chars(), "</s>"], types={"</s>": 3}, eos_token_id=256, add_eos_token=True)
    assert vocab.tokenize("a") == [97, 256]
    assert vocab.tokenize("a", add_special=False) == [97]
    assert vocab.tokenize("a</s>", parse_special=True) == [97, 256]
    assert vocab.tokenize("a</s>") == [97, *b"</s>", 256]


def test_fault_95_ids_stay_when_nothing_is_added() -> None:
    vocab = make([*byte_chars(), "<s>", "</s>", "<pad>"], types={"<s>": 3, "</s>": 3, "<pad>": 3}, bos_token_id=256, eos_token_id=257,
                 padding_token_id=258, add_bos_token=False, add_eos_token=False)  # fmt: skip
    assert (vocab.bos_id, vocab.eos_id, vocab.pad_id) == (256, 257, 258)
    assert vocab.token_bytes(256) == b"<s>" and vocab.is_special(256)
    assert vocab.tokenize("<s>", parse_special=True) == [256]
    assert vocab.eog_ids == frozenset({257})


def test_end_of_generation_ids() -> None:
    tokens = [*byte_chars(), "<|end_of_text|>", "<|im_end|>", "<|im_start|>", "<fim_pad>", "<stop>"]
    vocab = make(tokens, eos_token_id=256, eom_token_id=260)
    assert vocab.eot_id == 257  # found by its text
    assert vocab.eog_ids == frozenset({256, 257, 259, 260})
    # such a token is a control token even where the file says normal
    assert vocab.is_special(257) and not vocab.is_special(258)
    assert vocab.tokenize("<|im_end|>") == list(b"<|im_end|>")
    assert make(tokens, eos_token_id=256, eot_token_id=258).eot_id == 258
    plain = make(byte_chars())
    assert (plain.bos_id, plain.eos_id, plain.eot_id, plain.pad_id, plain.eog_ids) == (None, None, None, None, frozenset())


# Odd vocabularies


@pytest.mark.parametrize(
    ("token", "token_type", "expected"),
    [
        pytest.param("▁x", 1, "▁x".encode(), id="f94-sentencepiece"),
        pytest.param("中", 1, "中".encode(), id="f94-cjk"),
        pytest.param("Ġ中", 1, "Ġ中".encode(), id="f94-mixed"),
        pytest.param("a b", 1, b"a b", id="f94-space"),
        pytest.param("Ġa", 1, b" a", id="f94-byte-alphabet"),
        pytest.param("Ġa", 3, "Ġa".encode(), id="f94-control-is-literal"),
        pytest.param("Ġa", 5, b" a", id="unused"),
        pytest.param("", 1, b"", id="empty"),
        pytest.param("<0x0A>", 6, b"\n", id="byte"),
        pytest.param("<0xZZ>", 6, b"<0xZZ>", id="byte-no-hex"),
        pytest.param("<0x0A>", 1, b"<0x0A>", id="byte-by-text-only"),
    ],
)
def test_token_bytes(token: str, token_type: int, expected: bytes) -> None:
    vocab = make([*byte_chars(), token], types={token: token_type})
    assert vocab.token_bytes(256) == expected
    assert vocab.detokenize([97, 256, 98]) == f"a{expected.decode()}b"
    assert vocab.detokenize(vocab.tokenize(f"x▁x 中{token}")) == f"x▁x 中{token}"


def test_half_characters_are_replaced() -> None:
    vocab = make(byte_chars())
    assert vocab.detokenize("中".encode()[:2]) == "\ufffd"
    assert vocab.detokenize([0xFF, 0x41]) == "\ufffdA"


def test_a_byte_without_a_token_is_refused() -> None:
    vocab = make(["a", "b", "ab", "bĠc"], ["a b"], "llama-bpe")
    assert vocab.tokenize("ab") == [2]
    with pytest.raises(ParamError, match="byte 0x63, for which the vocabulary has no token"):
        vocab.tokenize("abc")
    # inside a longer token the byte is no loss
    assert make(["a", "abc"], pre="llama-bpe").tokenize("abc") == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("ab\ud800c", r"lone surrogate U\+D800 at index 2"), (b"ab", "takes a str, not bytes"), (None, "takes a str"),
     (" " * 1_000_001, "1000001 white-space characters in a row; legal: 1000000")],
    ids=["surrogate", "bytes", "none", "spaces"],
)  # fmt: skip
def test_texts_that_are_refused(demo: Vocab, text: Any, message: str) -> None:
    with pytest.raises(ParamError, match=message) as e:
        demo.tokenize(text)
    assert "\n" not in str(e.value)


def test_long_texts_are_no_trouble(demo: Vocab) -> None:
    for text in ("a" * 100_000, " " * 100_000 + "x", "ab " * 50_000):
        assert demo.detokenize(demo.tokenize(text)) == text


@pytest.mark.parametrize("token_id", [-1, 2048, 2**40, 1.5, "a", None], ids=str)
def test_ids_that_are_refused(demo: Vocab, token_id: Any) -> None:
    stream = StreamDetokenizer(demo)
    for call in (demo.token_bytes, demo.is_special, stream.push, lambda i: demo.detokenize([1, i])):
        with pytest.raises(ParamError, match="not in the vocabulary; legal: 0 to 2047|is no integer"):
            call(token_id)


# Metadata


class Lazy(Sequence[Any]):
    """Items that are made when asked for, as a reader over a mapped file gives them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: Any) -> Any:
        return self.items[i]


@pytest.mark.parametrize("width", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", list, Lazy], ids=str)
def test_fault_74_any_integer_width(demo: Vocab, demo_metadata: dict[str, Any], width: Any) -> None:
    types = [int(t) for t in demo_metadata["tokenizer.ggml.token_type"]]
    metadata = {
        **demo_metadata,
        "tokenizer.ggml.token_type": np.array(types, width) if isinstance(width, str) else width(types),
        "tokenizer.ggml.bos_token_id": np.zeros(1, width)[0] if isinstance(width, str) else 0,
        "tokenizer.ggml.tokens": Lazy(list(demo_metadata["tokenizer.ggml.tokens"])),
        "tokenizer.ggml.merges": np.array(demo_metadata["tokenizer.ggml.merges"]),
        "tokenizer.ggml.scores": np.zeros(2048, np.float32),
    }
    vocab = Vocab(metadata)
    text = "It is a truth<|endoftext|> universally acknowledged"
    assert vocab.tokenize(text, parse_special=True) == demo.tokenize(text, parse_special=True)
    assert type(vocab.bos_id) is int


@pytest.mark.parametrize(
    ("error", "message", "keys"),
    [
        pytest.param(FormatError, "bos_token_id is 258; legal: a token id, 0 to 257", {"bos_token_id": 258}, id="f74-bos-out-of-range"),
        pytest.param(FormatError, "eot_token_id is -1; legal", {"eot_token_id": -1}, id="f74-negative-id"),
        pytest.param(FormatError, "mask_token_id is 4294967295; legal", {"mask_token_id": 2**32 - 1}, id="f74-unread-id"),
        pytest.param(FormatError, "eos_token_id is 'a'; legal", {"eos_token_id": "a"}, id="f74-text-id"),
        pytest.param(FormatError, "eos_token_id is True; legal", {"eos_token_id": True}, id="f74-bool-id"),
        pytest.param(FormatError, r"merges\[1\] is 'ab'; legal: two tokens", {"merges": ["a b", "ab"]}, id="f74-merge-without-space"),
        pytest.param(FormatError, r"merges\[0\] is 'a '; legal: two tokens", {"merges": ["a "]}, id="f74-merge-without-right"),
        pytest.param(FormatError, r"merges\[0\] is ' a'; legal: two tokens", {"merges": [" a"]}, id="f74-merge-without-left"),
        pytest.param(FormatError, r"merges\[0\] is 'a b c'; legal: two tokens", {"merges": ["a b c"]}, id="f74-merge-of-three"),
        pytest.param(FormatError, r"merges\[0\] is 'a zz', but 'zz' is not in", {"merges": ["a zz"]}, id="f74-merge-of-unknown"),
        pytest.param(FormatError, r"merges\[0\] is 'a c', but 'ac' is not in", {"merges": ["a c"]}, id="f74-merge-to-unknown"),
        pytest.param(FormatError, r"merges\[0\] is 3; legal: a string", {"merges": [3]}, id="f74-merge-of-int"),
        pytest.param(FormatError, "merges is 'a b'; legal: a list", {"merges": "a b"}, id="f74-merges-text"),
        pytest.param(FormatError, "merges is missing", {"merges": None}, id="f74-no-merges"),
        pytest.param(FormatError, "tokens is missing", {"tokens": None}, id="f74-no-tokens"),
        pytest.param(FormatError, "tokens is empty", {"tokens": [], "token_type": None}, id="f74-empty-tokens"),
        pytest.param(FormatError, r"tokens\[1\] is b'b'; legal: a string", {"tokens": ["a", b"b"]}, id="f74-bytes-token"),
        pytest.param(FormatError, r"tokens\[1\] is '\\udcff'; legal: valid UTF-8", {"tokens": ["a", "\udcff"]}, id="f74-surrogate-token"),
        pytest.param(FormatError, r"tokens\[2\] is 'a', which is token 0 already", {"tokens": ["a", "b", "a"]}, id="f74-token-twice"),
        pytest.param(FormatError, "scores has 3 entries; legal: 258", {"scores": [0.0] * 3}, id="f74-short-scores"),
        pytest.param(FormatError, "scores is 1.0; legal: a list", {"scores": 1.0}, id="f74-scalar-scores"),
        pytest.param(FormatError, "token_type has 3 entries; legal: 258", {"token_type": [1] * 3}, id="f74-short-types"),
        pytest.param(FormatError, "token_type has 259 entries; legal: 258", {"token_type": np.ones(259, int)}, id="f74-long-types"),
        pytest.param(FormatError, r"token_type\[257\] is 'x'; legal: a list of integers", {"token_type": [1] * 257 + ["x"]}, id="f74-text-type"),
        pytest.param(FormatError, r"token_type\[0\] is .*1\.0.*; legal: a list of int", {"token_type": np.ones(258)}, id="f74-float-types"),
        pytest.param(FormatError, r"token_type\[257\] is \[1\]; legal", {"token_type": [1] * 257 + [[1]]}, id="f74-nested-types"),
        pytest.param(FormatError, r"token_type\[257\] is 7; legal: 0 to 6", {"token_type": [1] * 257 + [7]}, id="f74-unknown-type"),
        pytest.param(FormatError, "add_bos_token is 1; legal: true or false", {"add_bos_token": 1}, id="f93-mistyped"),
        pytest.param(FormatError, "add_bos_token is 'true'; legal", {"add_bos_token": "true"}, id="f93-text"),
        pytest.param(FormatError, "add_bos_token is true, but .*bos_token_id is missing", {"add_bos_token": True}, id="f93-no-bos-id"),
        pytest.param(FormatError, "add_eos_token is true, but .*eos_token_id is missing", {"add_eos_token": True}, id="f93-no-eos-id"),
        pytest.param(FormatError, "model is missing", {"model": None}, id="no-model"),
        pytest.param(FormatError, "model is 3; legal: a string", {"model": 3}, id="model-int"),
        pytest.param(ModelError, "model is 'llama'; known: 'gpt2'", {"model": "llama"}, id="model-spm"),
        pytest.param(ModelError, "pre is 'qwen2'; known: gpt-2, .*dbrx, .*llama-bpe, .*default", {"pre": "qwen2"}, id="pre-unknown"),
    ],
)
def test_bad_metadata(error: type[Exception], message: str, keys: dict[str, Any]) -> None:
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": [*byte_chars(), "ab", "<s>"], "token_type": [1] * 258, "merges": ["a b"], **keys}
    with pytest.raises(error, match=f"^tokenizer.ggml.{message}") as e:
        Vocab({f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None})
    assert "\n" not in str(e.value)


def test_empty_tokens_may_repeat() -> None:
    vocab = make([*byte_chars(), "", "ab", ""], ["a b"])
    assert vocab.tokenize("ab") == [257] and vocab.n_vocab == 259
    assert vocab.detokenize([256, 257, 258]) == "ab"


# Streaming


def pieces_of(vocab: Vocab, ids: Sequence[int], skip_special: bool = False) -> Iterator[str]:
    stream = StreamDetokenizer(vocab, skip_special)
    for i in ids:
        yield stream.push(i)
    yield stream.flush()


@check
@given(ids=st.lists(st.integers(0, 2047), max_size=60), skip_special=st.booleans())
def test_streaming_gives_the_whole(demo: Vocab, ids: list[int], skip_special: bool) -> None:
    assert "".join(pieces_of(demo, ids, skip_special)) == demo.detokenize(ids, skip_special)


@check
@given(ids=st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("é中👍".encode()))), max_size=40))
def test_streaming_any_bytes(ids: list[int]) -> None:
    vocab = make(byte_chars())
    assert "".join(pieces_of(vocab, ids)) == bytes(ids).decode(errors="replace")


@check
@given(text=ANY_TEXT)
def test_streaming_emits_whole_characters(text: str) -> None:
    """One byte a token: a character comes with its last byte, and none comes as U+FFFD."""
    got = list(pieces_of(make(byte_chars()), list(text.encode())))
    expected = [piece for c in text for piece in [""] * (len(c.encode()) - 1) + [c]]
    assert got == [*expected, ""]


def test_flush_ends_a_text() -> None:
    stream = StreamDetokenizer(make(byte_chars()))
    assert [stream.push(0xE4), stream.push(0xB8), stream.flush(), stream.flush()] == ["", "", "\ufffd", ""]
    assert stream.push(0x41) == "A"


# The house


def test_detokenizing_loads_no_library() -> None:
    code = (
        "import sys; from pyggml.runtime.vocab import Vocab\n"
        "v = Vocab({'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.tokens': ['a', 'b'], 'tokenizer.ggml.merges': []})\n"
        "assert v.detokenize([0, 1]) == 'ab' and 'tokenizers' not in sys.modules\n"
        "assert v.tokenize('ab') == [0, 1] and 'tokenizers' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
