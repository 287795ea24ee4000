"""Text to token ids and back: byte-level BPE vocabularies from GGUF metadata.

The vocabulary is read from the `tokenizer.ggml.*` keys and behaves as llama.cpp's: text is cut at special tokens, each
piece is cut by the pre-tokenizer's regular expressions, and every pre-token is byte-mapped and merged on its own (by
the `tokenizers` library, which is imported when the first text comes). Detokenizing needs no library.

A byte-level vocabulary writes every byte as one printable character (the GPT-2 byte alphabet): 188 printable Latin-1
characters stand for themselves, the other 68 bytes are U+0100 onwards, so a space is "Ġ" and a newline "Ċ".
"""

from __future__ import annotations

import codecs
import functools
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.errors import FormatError, ModelError, ParamError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Values of tokenizer.ggml.token_type; 0 (undefined), 1 (normal), 5 (unused) and 6 (byte) are plain text here.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_TOKEN_TYPES = range(7)

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """A pre-tokenizer: `splits` are applied one after the other to the pieces that the one before left."""

    names: tuple[str, ...]
    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS = (
    # The names of a row are those that llama.cpp gives the same split and the same flags.
    _Pre(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling", "gigachat", "a.x-4.0", "mellum",
         "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
        (_GPT2_SPLIT,),
    ),
    _Pre(("dbrx", "smaug-bpe"), (_LLAMA3_SPLIT,)),
    _Pre(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        (_LLAMA3_SPLIT,),
        ignore_merges=True,
        add_bos=True,
    ),
    _Pre(("default",), (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
)
_PRE_BY_NAME = {name: pre for pre in _PRE_TOKENIZERS for name in pre.names}

# llama.cpp finds these by their text, because many files name only one of them by id. Whatever token_type says, they
# are control tokens: no pre-tokenizer leaves a piece like them, so none of them can be part of ordinary text.
_EOT_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
              "<end_of_utterance>")
_EOG_TEXTS = (*_EOT_TEXTS, "<|eom_id|>", "</s>", "[EOS]",
              "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>",
              "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>")
_EOG_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


# The regular-expression engine gives up, for good, after ten million steps back; only white space makes it step back.
_MAX_SPACES = 1_000_000


def _byte_alphabet() -> tuple[str, ...]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    extra = itertools.count(256)
    return tuple(chr(b if b in printable else next(extra)) for b in range(256))


CHAR_OF_BYTE = _byte_alphabet()
"""The character that stands for each byte."""
_BYTE_OF_CHAR = {c: b for b, c in enumerate(CHAR_OF_BYTE)}


class Vocab:
    """A byte-level BPE vocabulary (`tokenizer.ggml.model` "gpt2") from the metadata of a GGUF file.

    `metadata` maps GGUF keys to values; lists may be lists, NumPy arrays or any sequence. Read are, all under
    `tokenizer.ggml.`: `model`, `tokens` and `merges` (needed), `pre` (absent: "default"), `token_type` (absent: all
    normal), `scores` (only its length), every `*_token_id`, `add_bos_token` and `add_eos_token`.

    An absent `add_bos_token` means what llama.cpp takes it to mean: True for the pre-tokenizer llama-bpe and its other
    names if there is a BOS id, False for all others. An absent `add_eos_token` means False. The ids stay available
    when nothing is to be added.

    Attributes: `n_vocab`; `pre`, the pre-tokenizer's name; `bos_id`, `eos_id`, `eot_id`, `pad_id` (None if absent; an
    absent `eot_token_id` is found by the usual texts, such as <|im_end|>); `add_bos`, `add_eos`; `eog_ids`, the ids
    that end a generation.

    Raises FormatError where a key is missing or holds what it cannot hold, and ModelError for a tokenizer model or a
    pre-tokenizer that pyggml does not have.

    >>> vocab = Vocab({
    ...     "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 0,
    ...     "tokenizer.ggml.tokens": ["<|end|>", "h", "i", "Ġ", "hi"], "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
    ...     "tokenizer.ggml.merges": ["h i"]})
    >>> vocab.tokenize("hi hi<|end|>", parse_special=True)
    [4, 3, 4, 0]
    >>> vocab.detokenize([4, 3, 4, 0], skip_special=True)
    'hi hi'
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = _string(metadata, "model")
        if model != "gpt2":
            raise ModelError(f"tokenizer.ggml.model is {model!r}; known: 'gpt2' (byte-level BPE)")
        self.pre = _string(metadata, "pre", "default")
        pre = _PRE_BY_NAME.get(self.pre)
        if pre is None:
            raise ModelError(f"tokenizer.ggml.pre is {self.pre!r}; known: {', '.join(_PRE_BY_NAME)}")
        self._pre = pre

        self._tokens = _strings(metadata, "tokens")
        self.n_vocab = n_vocab = len(self._tokens)
        if not n_vocab:
            raise FormatError("tokenizer.ggml.tokens is empty; a vocabulary has at least one token")
        # BPE uses no scores, but a list of another length is the mark of a broken file
        _per_token(metadata, "scores", "numbers", (int, float, np.integer, np.floating), n_vocab)
        id_of = _index(self._tokens)
        types = _token_types(metadata, n_vocab)
        ids = _token_ids(metadata, n_vocab)
        self.bos_id, self.eos_id, self.eot_id, self.pad_id = (ids.get(name) for name in ("bos", "eos", "eot", "padding"))
        if self.eot_id is None:
            self.eot_id = next((id_of[text] for text in _EOT_TEXTS if text in id_of), None)

        by_text = [id_of[text] for text in _EOG_TEXTS if text in id_of]
        types[by_text] = _CONTROL
        self._types = types.tobytes()  # one byte per token: indexing gives an int at once
        self.eog_ids = frozenset(by_text) | {ids[name] for name in _EOG_KEYS if name in ids}

        self.add_bos = _flag(metadata, "add_bos_token", default=pre.add_bos and self.bos_id is not None)
        self.add_eos = _flag(metadata, "add_eos_token", default=False)
        for name, add, token_id in (("bos", self.add_bos, self.bos_id), ("eos", self.add_eos, self.eos_id)):
            if add and token_id is None:
                raise FormatError(f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id is missing")

        # Longest first, as llama.cpp cuts them; an empty text would match everywhere.
        self._literal_ids = [int(i) for i in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED))) if self._tokens[i]]
        self._literal_ids.sort(key=lambda i: (-len(self._tokens[i].encode()), i))
        self._bpe_vocab, self._merges = self._bpe_tables(metadata, id_of)

    def __repr__(self) -> str:
        return f"Vocab({self.pre}, {self.n_vocab} tokens, bos {self.bos_id}, eos {self.eos_id})"

    def _bpe_tables(self, metadata: Mapping[str, Any], id_of: dict[str, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Tokens that merging may make, and the merges in order.

        Tokens that are matched as a whole are left out unless a merge names them: under ignore_merges the text of a
        control token that is a single word would otherwise become that token.
        """
        bpe_vocab = dict(id_of)
        for i in self._literal_ids:
            del bpe_vocab[self._tokens[i]]
        texts = _strings(metadata, "merges")
        merges = [(left, right) for left, _, right in (text.partition(" ") for text in texts)]
        # why: a pass in C for each check, as there are 100,000 merges and nearly always all are good tokens. No text of a token is empty.
        if " ".join(texts).count(" ") != max(2 * len(texts) - 1, 0) or not all(
                map(bpe_vocab.__contains__, chain(chain.from_iterable(merges), map("".join, merges)))):
            _add_named(bpe_vocab, id_of, texts)
        return bpe_vocab, merges

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE(self._bpe_vocab, self._merges, ignore_merges=self._pre.ignore_merges))
        self._merges = []  # why: tens of megabytes that the tokenizer now has itself; it is built once
        steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in self._pre.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return tokenizer

    @functools.cached_property
    def _missing_bytes(self) -> frozenset[int]:
        return frozenset(b for b, c in enumerate(CHAR_OF_BYTE) if c not in self._bpe_vocab)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of `text`; `detokenize` gives exactly `text` back when nothing was added.

        `add_special` puts BOS in front if `add_bos`, and EOS at the end if `add_eos`, but never beside one that the
        text already holds there. With `parse_special` the texts of control tokens become these tokens; without it they
        are ordinary text. User-defined tokens are always matched.

        Raises ParamError for a text that is no valid Unicode (a lone surrogate), and for one with a byte that the
        vocabulary has no token for.
        """
        if not isinstance(text, str):
            raise ParamError(f"tokenize takes a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ParamError(f"text has the lone surrogate U+{ord(text[e.start]):04X} at index {e.start}; legal: valid Unicode") from None
        if len(text) > _MAX_SPACES and (n := max(map(len, re.findall(r"\s+", text)), default=0)) > _MAX_SPACES:
            raise ParamError(f"text has {n} white-space characters in a row; legal: {_MAX_SPACES}")
        fragments = self._cut_at_literals(text, parse_special)
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None and fragments[:1] != [self.bos_id]:
            ids.append(self.bos_id)
        for fragment in fragments:
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids.extend(self._merge(fragment))
        if add_special and self.add_eos and self.eos_id is not None and fragments[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def _cut_at_literals(self, text: str, parse_special: bool) -> list[str | int]:
        """`text` as pieces of plain text and ids of the special tokens between them."""
        fragments: list[str | int] = [text] if text else []
        for token_id in self._literal_ids:
            literal = self._tokens[token_id]
            if literal not in text or not (parse_special or self._types[token_id] == _USER_DEFINED):
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                for i, piece in enumerate(fragment.split(literal)):
                    if i:
                        cut.append(token_id)
                    if piece:
                        cut.append(piece)
            fragments = cut
        return fragments

    def _merge(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        missing = self._missing_bytes.intersection(text.encode())
        # why: BPE drops what it has no token for, in silence; yet such a byte may be inside a longer token
        if missing and b"".join(map(self._bytes, ids)) != text.encode():
            raise ParamError(f"text holds byte 0x{min(missing):02X}, for which the vocabulary has no token")
        return ids

    def detokenize(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`. Bytes that are no valid UTF-8 become U+FFFD; `skip_special` leaves out control tokens.

        Raises ParamError for an id that is not in the vocabulary.
        """
        return b"".join(self._pieces(ids, skip_special)).decode(errors="replace")

    def _pieces(self, ids: Iterable[int], skip_special: bool) -> Iterator[bytes]:
        for token_id in map(self._check_id, ids):
            if not (skip_special and self._types[token_id] in (_UNKNOWN, _CONTROL)):
                yield self._bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; those of special and user-defined tokens are their text in UTF-8.

        So are those of a token with a character that stands for no byte: it is taken literally. A token of type byte
        may be written <0x0A>.
        """
        return self._bytes(self._check_id(token_id))

    def is_special(self, token_id: int) -> bool:
        """True for control and unknown tokens, which `skip_special` leaves out; False for user-defined ones."""
        return self._types[self._check_id(token_id)] in (_UNKNOWN, _CONTROL)

    def _check_id(self, token_id: int) -> int:
        try:
            i = operator.index(token_id)
        except TypeError:
            raise ParamError(f"token id {token_id!r} is no integer") from None
        if not 0 <= i < self.n_vocab:
            raise ParamError(f"token id {i} is not in the vocabulary; legal: 0 to {self.n_vocab - 1}")
        return i

    def _bytes(self, token_id: int) -> bytes:
        text, token_type = self._tokens[token_id], self._types[token_id]
        if token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            return text.encode()
        if token_type == _BYTE and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes.fromhex(text[3:5])
            except ValueError:
                return text.encode()
        try:
            return bytes(map(_BYTE_OF_CHAR.__getitem__, text))
        except KeyError:
            return text.encode()


class StreamDetokenizer:
    """Text of token ids as they come, in whole characters: a character spread over tokens appears with its last one.

    All results of `push` and the one of `flush` together are `vocab.detokenize` of all the ids.
    """

    def __init__(self, vocab: Vocab, skip_special: bool = False) -> None:
        self._vocab = vocab
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; ParamError for an id that is not in the vocabulary."""
        if self._skip_special and self._vocab.is_special(token_id):
            return ""
        return self._decoder.decode(self._vocab.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: "" or U+FFFD for a character that never was completed. Then a new text may start."""
        return self._decoder.decode(b"", final=True)


def _string(metadata: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is None:
        raise FormatError(f"tokenizer.ggml.{name} is missing")
    if not isinstance(value, str):
        raise FormatError(f"tokenizer.ggml.{name} is {value!r}; legal: a string")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        raise FormatError(f"{key} is missing")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise FormatError(f"{key} is {value!r}; legal: a list of strings")
    strings = list(value)
    try:
        "".join(strings).encode()  # one pass in C over what is nearly always a good list
    except (TypeError, UnicodeEncodeError):
        for i, s in enumerate(strings):
            if not isinstance(s, str):
                raise FormatError(f"{key}[{i}] is {s!r}; legal: a string") from None
            if any("\ud800" <= c <= "\udfff" for c in s):
                raise FormatError(f"{key}[{i}] is {s!r}; legal: valid UTF-8") from None
        raise
    return strings


def _index(tokens: Sequence[str]) -> dict[str, int]:
    """Id by text. Empty texts, which some converters write for ids that do not exist, are left out and may repeat."""
    id_of = {text: i for i, text in enumerate(tokens)}
    if len(id_of) != len(tokens):
        first: dict[str, int] = {}
        for i, text in enumerate(tokens):
            if first.setdefault(text, i) != i and text:
                raise FormatError(f"tokenizer.ggml.tokens[{i}] is {text!r}, which is token {first[text]} already; legal: each text once")
    id_of.pop("", None)
    return id_of


def _add_named(bpe_vocab: dict[str, int], id_of: dict[str, int], merges: Sequence[str]) -> None:
    """Add the tokens that merges name; FormatError for a merge that is not two tokens of which a third one is made."""
    for i, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise FormatError(f"tokenizer.ggml.merges[{i}] is {merge!r}; legal: two tokens with one space between them")
        for part in (left, right, left + right):
            if part not in id_of:
                raise FormatError(f"tokenizer.ggml.merges[{i}] is {merge!r}, but {part!r} is not in tokenizer.ggml.tokens")
            bpe_vocab[part] = id_of[part]


def _per_token(metadata: Mapping[str, Any], name: str, legal: str, types: tuple[type, ...], n_vocab: int) -> np.ndarray | None:
    """The array of one number per token, None if the key is absent; `types` are the scalar types of what is `legal`."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise FormatError(f"{key} is {value!r}; legal: a list of {legal}")
    if len(value) != n_vocab:
        raise FormatError(f"{key} has {len(value)} entries; legal: {n_vocab}, one for each of tokenizer.ggml.tokens")
    try:
        array = np.asarray(value if isinstance(value, np.ndarray) else list(value))
    except ValueError:  # nested lists of unequal lengths
        array = np.empty(0, object)
    if not issubclass(array.dtype.type, types) or array.ndim != 1:
        i = next((i for i, x in enumerate(value) if not isinstance(x, types)), 0)
        raise FormatError(f"{key}[{i}] is {value[i]!r}; legal: a list of {legal}")
    return array


def _token_types(metadata: Mapping[str, Any], n_vocab: int) -> np.ndarray:
    types = _per_token(metadata, "token_type", "integers", (int, np.integer), n_vocab)
    if types is None:
        return np.ones(n_vocab, np.uint8)
    bad = np.flatnonzero((types < _TOKEN_TYPES.start) | (types >= _TOKEN_TYPES.stop))
    if bad.size:
        raise FormatError(
            f"tokenizer.ggml.token_type[{bad[0]}] is {types[bad[0]]}; legal: {_TOKEN_TYPES.start} to {_TOKEN_TYPES.stop - 1}"
        )
    return types.astype(np.uint8)


def _token_ids(metadata: Mapping[str, Any], n_vocab: int) -> dict[str, int]:
    """Every tokenizer.ggml.NAME_token_id by its NAME."""
    prefix, suffix = "tokenizer.ggml.", "_token_id"
    ids: dict[str, int] = {}
    for key in metadata:
        if not (key.startswith(prefix) and key.endswith(suffix)):
            continue
        value = metadata[key]
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < n_vocab:
            raise FormatError(f"{key} is {value!r}; legal: a token id, 0 to {n_vocab - 1}")
        ids[key[len(prefix) : -len(suffix)]] = int(value)
    return ids


def _flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool | np.bool_):
        raise FormatError(f"tokenizer.ggml.{name} is {value!r}; legal: true or false")
    return bool(value)
