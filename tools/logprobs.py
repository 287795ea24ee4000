"""Log-probabilities of a base model in a file, and the divergence of another model from them.

The file is llama.cpp's (`llama-perplexity --kl-divergence-base`), so either program reads what the other saved. Little-endian:

  8 bytes "_logits_", u32 n_ctx, i32 n_vocab, i32 n_chunk, i32 tokens [n_chunk, n_ctx];
  then for each chunk and each scored position (n_ctx - 1 - n_ctx // 2 of them, the first at n_ctx // 2) f32 scale, f32 least, and n_vocab u16
  q, one more where n_vocab is odd: log p = scale q + least. What is more than 16 below the likeliest token is q = 0, and takes no part in
  the divergence.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from pyggml.errors import FormatError

MAGIC = b"_logits_"
_HEAD = struct.Struct("<8sIii")
_RANGE = 16.0


def first_scored(n_ctx: int) -> int:
    """The first position of a chunk whose prediction is scored: the model then has half a chunk to go by."""
    return n_ctx // 2


def n_scored(n_ctx: int) -> int:
    """Predictions that are scored in a chunk; that of its last token has no successor to compare with."""
    return n_ctx - 1 - first_scored(n_ctx)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log p in float64 of one position's float32 logits.

    >>> log_softmax(np.zeros(4, np.float32)).tolist() == [-math.log(4)] * 4
    True
    """
    x = logits.astype(np.float64) - logits.max()
    return x - np.log(np.exp(x).sum())


class BaseFile:
    """An open file of log-probabilities: `n_ctx`, `n_vocab`, `tokens` [n_chunk, n_ctx]."""

    def __init__(self, path: str, file: BinaryIO, n_vocab: int, tokens: np.ndarray) -> None:
        self.path = path
        self.n_vocab = n_vocab
        self.tokens = tokens
        self.n_chunk, self.n_ctx = tokens.shape
        self._file = file
        self._row_bytes = row_bytes(n_vocab)

    def _seek(self, chunk: int, row: int) -> None:
        at = _HEAD.size + 4 * self.tokens.size + (chunk * n_scored(self.n_ctx) + row) * self._row_bytes
        self._file.seek(at)

    def write(self, chunk: int, row: int, log_p: np.ndarray) -> None:
        """Store the log-probabilities of one scored position."""
        with _disk(self.path):
            self._seek(chunk, row)
            self._file.write(pack_row(log_p))

    def read(self, chunk: int, row: int) -> np.ndarray:
        """Those of one scored position, float64 [n_vocab]."""
        self._seek(chunk, row)
        return unpack_row(self._file.read(self._row_bytes), self.n_vocab)


def row_bytes(n_vocab: int) -> int:
    """Bytes of one position."""
    return 8 + 2 * (n_vocab + n_vocab % 2)


def pack_row(log_p: np.ndarray) -> bytes:
    """One position as the file holds it."""
    top = log_p.max()
    least = max(float(log_p.min()), float(top) - _RANGE)
    scale = np.float32((top - least) / 65535)
    q = np.zeros(len(log_p) + len(log_p) % 2, "<u2")
    if scale > 0:
        q[:len(log_p)] = np.rint((np.maximum(log_p, least) - least) / float(scale)).clip(0, 65535)
    return struct.pack("<ff", scale, least) + q.tobytes()


def unpack_row(raw: bytes, n_vocab: int) -> np.ndarray:
    """float64 [n_vocab] log-probabilities of one position."""
    scale, least = struct.unpack_from("<ff", raw)
    return scale * np.frombuffer(raw, "<u2", n_vocab, 8) + least


@contextlib.contextmanager
def create_base(path: str, n_vocab: int, tokens: np.ndarray) -> Iterator[BaseFile]:
    """A new file for the chunks `tokens` [n_chunk, n_ctx], in any order of rows; it has its name only once the block ends without an exception."""
    part = f"{path}.part"
    try:
        with _disk(path):
            file = open(part, "wb")
        with file:
            with _disk(path):
                file.write(_HEAD.pack(MAGIC, tokens.shape[1], n_vocab, tokens.shape[0]) + tokens.astype("<i4").tobytes())
            yield BaseFile(path, file, n_vocab, tokens)
            with _disk(path):
                file.flush()
        with _disk(path):
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


@contextlib.contextmanager
def _disk(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise FormatError(f"{path}: cannot be written: {e.strerror}") from None


@contextlib.contextmanager
def open_base(path: str) -> Iterator[BaseFile]:
    """A file of log-probabilities to read; FormatError unless it is whole."""
    try:
        file = open(path, "rb")
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if head[:8] != MAGIC or len(head) < _HEAD.size:
            raise FormatError(f"{path}: the first bytes {head[:8]!r}; legal: {MAGIC!r}, a file of log-probabilities")
        _, n_ctx, n_vocab, n_chunk = _HEAD.unpack(head)
        if n_ctx < 4 or n_vocab < 1 or n_chunk < 1:
            raise FormatError(f"{path}: {n_chunk} chunks of {n_ctx} tokens, a vocabulary of {n_vocab}; legal: 1, 4 and 1 or more")
        expected = _HEAD.size + n_chunk * (4 * n_ctx + n_scored(n_ctx) * row_bytes(n_vocab))
        if size != expected:
            raise FormatError(f"{path}: {size} bytes; legal: {expected} for {n_chunk} chunks of {n_ctx} tokens and a vocabulary of {n_vocab}")
        tokens = np.frombuffer(file.read(4 * n_chunk * n_ctx), "<i4").reshape(n_chunk, n_ctx)
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise FormatError(f"{path}: token id {tokens.min() if tokens.min() < 0 else tokens.max()}; legal: 0 to {n_vocab - 1}")
        yield BaseFile(path, file, n_vocab, tokens)


class Divergence:
    """What a model's predictions are like beside those of the base: one entry per chunk and scored position of each of
    `nll` and `nll_base` (nats), `kld`, `p_diff` (of the token that came) and `same_top`."""

    def __init__(self, n_chunk: int, n_scored: int) -> None:
        self.nll, self.nll_base, self.kld, self.p_diff, self.same_top = np.zeros((5, n_chunk, n_scored))

    def add(self, chunk: int, row: int, log_p: np.ndarray, base: np.ndarray, token: int) -> None:
        """One position: log-probabilities of the model and of the base, and the token that came."""
        counts = base > -_RANGE
        at = chunk, row
        self.kld[at] = np.sum(np.exp(base[counts]) * (base[counts] - log_p[counts]))
        self.nll[at], self.nll_base[at] = -log_p[token], -base[token]
        self.p_diff[at] = np.exp(log_p[token]) - np.exp(base[token])
        self.same_top[at] = log_p.argmax() == base.argmax()

    def chunk_line(self, n: int) -> str:
        """The estimates of the first n chunks, in the columns of CHUNK_HEADER."""
        (nll, error), (base, base_error) = mean(self.nll[:n]), mean(self.nll_base[:n])
        ratio = nll - base, _difference(error, base_error, covariance(self.nll[:n], self.nll_base[:n]))
        kld, rms, top = mean(self.kld[:n]), _rms(self.p_diff[:n]), _share(self.same_top[:n])
        return (f"{n:4d}    {math.exp(nll):9.4f} ± {math.exp(nll) * error:9.4f}    {ratio[0]:10.5f} ± {ratio[1]:10.5f}"
                f"    {kld[0]:10.5f} ± {kld[1]:10.5f}    {rms[0]:6.3f} ± {rms[1]:6.3f} %    {top[0]:6.3f} ± {top[1]:6.3f} %")

    def row(self) -> dict[str, float]:
        """The statistics that a record holds."""
        kld, error = mean(self.kld)
        return {"ppl_base": math.exp(self.nll_base.mean()), "kld": kld, "kld_error": error, "kld_max": float(self.kld.max()),
                "kld_p99": float(np.quantile(self.kld, 0.99)), "p_diff_rms": float(np.sqrt(np.square(self.p_diff).mean())),
                "same_top": float(self.same_top.mean())}

    def summary(self) -> list[str]:
        """All statistics, in llama-perplexity's words."""
        (nll, error), (base, base_error) = mean(self.nll), mean(self.nll_base)
        cov = covariance(self.nll, self.nll_base)
        ppl, ppl_base, log_ratio = math.exp(nll), math.exp(base), nll - base
        log_ratio_error = _difference(error, base_error, cov)
        perplexities: dict[str, float | tuple[float, float]] = {
            "Mean PPL(Q)": (ppl, ppl * error), "Mean PPL(base)": (ppl_base, ppl_base * base_error),
            "Cor(ln(PPL(Q)), ln(PPL(base)))": 100 * cov / (error * base_error) if error and base_error else math.nan,
            "Mean ln(PPL(Q)/PPL(base))": (log_ratio, log_ratio_error),
            "Mean PPL(Q)/PPL(base)": (math.exp(log_ratio), math.exp(log_ratio) * log_ratio_error),
            "Mean PPL(Q)-PPL(base)": (ppl - ppl_base, _difference(ppl * error, ppl_base * base_error, ppl * ppl_base * cov))}
        kld, p_diff, rms, top = mean(self.kld), mean(self.p_diff), _rms(self.p_diff), _share(self.same_top)
        lines = ["====== Perplexity statistics ======"]
        lines += [f"{name}: {v:6.2f}%" if isinstance(v, float) else f"{name:<30}: {v[0]:10.6f} ± {v[1]:10.6f}" for name, v in perplexities.items()]
        lines += ["", "====== KL divergence statistics ======", f"Mean    KLD: {kld[0]:10.6f} ± {kld[1]:10.6f}"]
        lines += [f"{name:<7} KLD: {np.quantile(self.kld, q):10.6f}" for name, q in _quantiles(99.9, 99, 95, 90, 50, 10, 5, 1, 0.1)]
        lines += ["", "====== Token probability statistics ======", f"Mean    Δp: {100 * p_diff[0]:6.3f} ± {100 * p_diff[1]:5.3f} %"]
        lines += [f"{name:<7} Δp: {100 * np.quantile(self.p_diff, q):6.3f}%" for name, q in _quantiles(99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1)]
        return [*lines, f"RMS Δp    : {rms[0]:6.3f} ± {rms[1]:5.3f} %", f"Same top p: {top[0]:6.3f} ± {top[1]:5.3f} %"]


CHUNK_HEADER = "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p"


def mean(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(max(1, values.size - 1)))


def covariance(a: np.ndarray, b: np.ndarray) -> float:
    """Of the means of a and b."""
    return float(np.mean((a - a.mean()) * (b - b.mean())) / max(1, a.size - 1))


def _difference(error_a: float, error_b: float, cov: float) -> float:
    """Uncertainty of the difference of two correlated estimates."""
    return math.sqrt(max(0.0, error_a * error_a + error_b * error_b - 2 * cov))


def _rms(values: np.ndarray) -> tuple[float, float]:
    """Root mean square and its standard error, in percent."""
    square, error = mean(np.square(values))
    rms = math.sqrt(square)
    return 100 * rms, 50 * error / rms if rms else 0.0


def _share(marks: np.ndarray) -> tuple[float, float]:
    """Share of ones and its standard error, in percent."""
    p, error = mean(marks)
    return 100 * p, 100 * error


def _quantiles(*percents: float) -> list[tuple[str, float]]:
    middle = [("Median" if p == 50 else f"{p:4.1f}%", p / 100) for p in percents]
    return [("Maximum", 1.0), *middle, ("Minimum", 0.0)]
