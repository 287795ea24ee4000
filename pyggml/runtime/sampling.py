"""Picking the next token from logits: greedy, or top-k, top-p, temperature and one draw, in llama.cpp's order.

A sampler is a list of steps, each of which narrows or rescales the candidates: ids in ascending order with their
logits in float64. Every step breaks ties by id, so that the same logits give the same candidates everywhere.
"""

from __future__ import annotations

import functools
import math
import operator
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml.errors import DTypeError, ParamError, ShapeError

_Step = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """What a sampler does; `temp` <= 0 is greedy, `top_k` 0 and `top_p` 1 are off.

    `top_p` is the share of the probability, before the temperature, that the kept tokens have at least; it keeps
    `min_keep` tokens or more. ParamError for a value that has no meaning.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_keep: int = 1

    def __post_init__(self) -> None:
        for name in ("top_k", "min_keep"):
            if _integer(name, getattr(self, name)) < 0:
                raise ParamError(f"{name} is {getattr(self, name)}; legal: 0 or more")
        if not _finite(self.temp):
            raise ParamError(f"temp is {self.temp!r}; legal: a finite number, 0 or less for greedy")
        if not _finite(self.top_p) or not 0 < self.top_p <= 1:
            raise ParamError(f"top_p is {self.top_p!r}; legal: more than 0, at most 1")


class Sampler:
    """Draws token ids from logits.

    `temp`, `top_k`, `top_p`, `min_keep`: see SamplerParams; they are kept in `params`. `seed`, an integer of 0 or
    more, makes the draws repeat on every machine (PCG64); with None a seed is taken from the system. `seed` is also
    the attribute that holds the one in use. ParamError for an illegal value.

    >>> logits = np.array([1.0, 3.0, 2.0, 3.0])
    >>> Sampler(temp=0.0).sample(logits)                    # greedy: the lowest id of the largest
    1
    >>> sampler = Sampler(temp=1.0, top_k=2, top_p=1.0, seed=1)
    >>> ids, p = sampler.distribution(logits)
    >>> ids.tolist(), p.tolist()
    ([1, 3], [0.5, 0.5])
    >>> draws = [sampler.sample(logits) for _ in range(8)]
    >>> sampler.reset()
    >>> draws == [sampler.sample(logits) for _ in range(8)]
    True
    """

    def __init__(self, temp: float = 0.8, top_k: int = 40, top_p: float = 0.95, seed: int | None = None, min_keep: int = 1) -> None:
        self.params = params = SamplerParams(temp, top_k, top_p, min_keep)
        self.seed = secrets.randbits(32) if seed is None else _integer("seed", seed)
        if self.seed < 0:
            raise ParamError(f"seed is {seed}; legal: 0 or more, None for one from the system")
        self._steps: list[_Step] = []
        if params.top_k:
            self._steps.append(functools.partial(_top_k, k=operator.index(params.top_k)))
        if params.top_p < 1:
            self._steps.append(functools.partial(_top_p, p=params.top_p, min_keep=operator.index(params.min_keep)))
        if params.temp > 0:
            self._steps.append(functools.partial(_temperature, temp=params.temp))
        self.reset()

    def __repr__(self) -> str:
        return f"Sampler(temp={self.params.temp}, top_k={self.params.top_k}, top_p={self.params.top_p}, seed={self.seed})"

    def reset(self) -> None:
        """Start again from the seed: the draws repeat."""
        self._rng = np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: np.ndarray) -> int:
        """One token id for `logits` [n_vocab]: unscaled log probabilities, of any real type.

        Every call takes one number from the generator, greedy calls none. A logit of -inf is never picked; logits of
        +inf share all the probability. Raises ParamError for logits with NaN or with nothing but -inf.
        """
        if self.params.temp <= 0:
            return int(np.argmax(_checked(logits)))
        ids, p = self.distribution(logits)
        total = np.cumsum(p)
        # why: rounding may put the drawn number at the total, which trailing candidates may be too small to have raised
        last = np.searchsorted(total, total[-1], side="left")
        return int(ids[min(np.searchsorted(total, self._rng.random() * total[-1], side="right"), last)])

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What `sample` draws from: candidate ids (int64, ascending) and their probabilities (float64, above 0, sum 1).

        Greedy sampling has one candidate.
        """
        x = _checked(logits)
        if self.params.temp <= 0:
            return np.array([np.argmax(x)]), np.ones(1)
        if x.max() == math.inf:
            x = np.where(x == math.inf, 0.0, -math.inf)
        ids = np.arange(x.size)
        for step in self._steps:
            ids, x = step(ids, x)
        p = _softmax(x)
        possible = p > 0
        return ids[possible], p[possible]


def _checked(logits: np.ndarray) -> np.ndarray:
    """`logits` as float64 [n_vocab], with at least one that can be picked."""
    x = np.asarray(logits)
    if x.dtype.kind not in "fiu":
        raise DTypeError(f"logits are {x.dtype}; legal: real numbers")
    if x.ndim != 1 or not x.size:
        raise ShapeError(f"logits have shape {x.shape}; legal: one row, [n_vocab]")
    x = x.astype(np.float64)
    top = x.max()  # NaN if any is
    if math.isnan(top):
        bad = np.flatnonzero(np.isnan(x))
        raise ParamError(f"logits hold NaN at {bad.size} of {x.size} tokens, first at id {bad[0]}: there is nothing to sample from")
    if top == -math.inf:
        raise ParamError(f"all {x.size} logits are -inf: there is nothing to sample from")
    return x


def _below_top(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """(x - max) / scale; what is too far below becomes -inf, as it should."""
    with np.errstate(over="ignore"):
        return np.asarray((x - x.max()) / scale)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(_below_top(x))
    return np.asarray(e / e.sum())


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """Indices, ascending, of the k largest; among equals the lowest indices."""
    if k >= x.size:
        return np.arange(x.size)
    kth = np.partition(x, x.size - k)[x.size - k]
    above = np.flatnonzero(x > kth)
    equal = np.flatnonzero(x == kth)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def _top_k(ids: np.ndarray, x: np.ndarray, *, k: int) -> tuple[np.ndarray, np.ndarray]:
    keep = _largest(x, k)
    return ids[keep], x[keep]


def _top_p(ids: np.ndarray, x: np.ndarray, *, p: float, min_keep: int) -> tuple[np.ndarray, np.ndarray]:
    """The fewest most probable tokens whose probabilities reach p together."""
    probs = _softmax(x)
    size = max(256, min_keep)  # why: sorting the whole vocabulary costs ten times all the rest, and few tokens reach p
    while True:
        head = _largest(x, size)
        head = head[np.argsort(-x[head], kind="stable")]
        total = np.cumsum(probs[head])
        if total[-1] >= p or size >= probs.size:
            break
        size *= 8
    n_keep = max(int(np.searchsorted(total, p, side="left")) + 1, min_keep)
    keep = np.sort(head[:n_keep])
    return ids[keep], x[keep]


def _temperature(ids: np.ndarray, x: np.ndarray, *, temp: float) -> tuple[np.ndarray, np.ndarray]:
    return ids, _below_top(x, temp)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ParamError(f"{name} is {value!r}; legal: an integer")
    return int(value)


def _finite(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value)
