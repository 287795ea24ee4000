"""Sampling: candidate sets and probabilities worked out by hand, draws counted against them."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import numpy as np
import pytest

from pyggml.errors import DTypeError, ParamError, PyggmlError, ShapeError
from pyggml.runtime.sampling import Sampler, SamplerParams

NAN, INF = math.nan, math.inf
P = [0.15, 0.5, 0.1, 0.25]  # by rank: ids 1, 3, 0, 2
LOGITS = np.log(P) + 7.0


def distribution(logits: Any, **options: Any) -> dict[int, float]:
    options = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, **options}
    ids, p = Sampler(**options).distribution(np.asarray(logits))
    assert ids.tolist() == sorted(ids.tolist())
    return dict(zip(ids.tolist(), p.tolist(), strict=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, {0: 0.15, 1: 0.5, 2: 0.1, 3: 0.25}, id="all-off"),
        pytest.param({"top_k": 1}, {1: 1.0}, id="top-k-1"),
        pytest.param({"top_k": 2}, {1: 2 / 3, 3: 1 / 3}, id="top-k-2"),
        pytest.param({"top_k": 3}, {0: 1 / 6, 1: 5 / 9, 3: 5 / 18}, id="top-k-3"),
        pytest.param({"top_k": 4}, {0: 0.15, 1: 0.5, 2: 0.1, 3: 0.25}, id="top-k-all"),
        pytest.param({"top_k": 99}, {0: 0.15, 1: 0.5, 2: 0.1, 3: 0.25}, id="top-k-more-than-all"),
        pytest.param({"top_p": 0.01}, {1: 1.0}, id="top-p-keeps-one"),
        pytest.param({"top_p": 0.49}, {1: 1.0}, id="top-p-0.49"),
        pytest.param({"top_p": 0.6}, {1: 2 / 3, 3: 1 / 3}, id="top-p-0.6"),
        pytest.param({"top_p": 0.76}, {0: 1 / 6, 1: 5 / 9, 3: 5 / 18}, id="top-p-0.76"),
        pytest.param({"top_p": 0.95}, {0: 0.15, 1: 0.5, 2: 0.1, 3: 0.25}, id="top-p-0.95"),
        pytest.param({"top_p": 0.01, "min_keep": 3}, {0: 1 / 6, 1: 5 / 9, 3: 5 / 18}, id="min-keep"),
        pytest.param({"top_p": 0.01, "min_keep": 99}, {0: 0.15, 1: 0.5, 2: 0.1, 3: 0.25}, id="min-keep-more-than-all"),
        # top-k first: of the two, id 1 has 0.667 >= 0.66. The other way round 0.5 < 0.66 would keep both.
        pytest.param({"top_k": 2, "top_p": 0.66}, {1: 1.0}, id="top-k-before-top-p"),
        # top-p before the temperature: flattened first, 0.6 would need more than two tokens.
        pytest.param({"top_p": 0.6, "temp": 10.0}, {1: 2**0.1 / (1 + 2**0.1), 3: 1 / (1 + 2**0.1)}, id="top-p-before-temp"),
        pytest.param({"temp": 0.5}, {i: p * p / 0.345 for i, p in enumerate(P)}, id="temp-0.5"),
        pytest.param({"temp": 2.0}, {i: math.sqrt(p) / sum(map(math.sqrt, P)) for i, p in enumerate(P)}, id="temp-2"),
        pytest.param({"temp": 0.0}, {1: 1.0}, id="greedy"),
        pytest.param({"temp": -1.0}, {1: 1.0}, id="negative-temp-is-greedy"),
    ],
)
def test_distribution(options: dict[str, Any], expected: dict[int, float]) -> None:
    assert distribution(LOGITS, **options) == pytest.approx(expected, rel=1e-12)
    assert distribution(LOGITS.astype(np.float32), **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        pytest.param([1.0, 1.0, 1.0, 1.0], {"top_k": 2}, {0: 0.5, 1: 0.5}, id="top-k-lowest-ids"),
        pytest.param([0.0, 5.0, 5.0, 9.0, 5.0], {"top_k": 3, "temp": 1e-9}, {3: 1.0}, id="top-k-then-cold"),
        pytest.param([0.0, 5.0, 5.0, 9.0, 5.0], {"top_k": 3, "temp": 1e9}, {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}, id="top-k-tie-at-the-cut"),
        pytest.param([2.0, 2.0, 2.0, 2.0], {"top_p": 0.5}, {0: 0.5, 1: 0.5}, id="top-p-lowest-ids"),
        pytest.param([3.0, -INF, 3.0, -INF], {}, {0: 0.5, 2: 0.5}, id="minus-inf-is-out"),
        pytest.param([3.0, -INF, 3.0, -INF], {"top_k": 3, "top_p": 0.999, "min_keep": 3}, {0: 0.5, 2: 0.5}, id="minus-inf-is-out-of-top-k"),
        pytest.param([3.0, INF, 3.0, INF], {"top_k": 3, "top_p": 0.999}, {1: 0.5, 3: 0.5}, id="plus-inf-is-certain"),
        pytest.param([-1e308, 0.0, 1e308], {"temp": 1e-300}, {2: 1.0}, id="no-overflow"),
        pytest.param([-1e308, 0.0, 1e308], {"top_p": 0.9, "min_keep": 3}, {2: 1.0}, id="no-overflow-top-p"),
        pytest.param([1000.0, 1000.0 + math.log(3), -1000.0], {}, {0: 0.25, 1: 0.75}, id="large-logits"),
        pytest.param([7], {}, {0: 1.0}, id="one-token"),
    ],
)
def test_edges(logits: list[float], options: dict[str, Any], expected: dict[int, float]) -> None:
    with np.errstate(all="raise", under="ignore"):
        assert distribution(logits, **options) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("temp", [0.0, -1.0])
def test_greedy_takes_the_lowest_id_of_the_largest(temp: float) -> None:
    sampler = Sampler(temp=temp, top_k=3)
    assert sampler.sample(np.array([0.0, 2.0, -INF, 2.0], np.float32)) == 1
    assert sampler.sample(np.array([0.0, 2.0, INF, INF], np.float16)) == 2
    assert sampler.sample(np.array([3, 2, 3])) == 0
    assert type(sampler.sample(LOGITS)) is int


@pytest.mark.parametrize(
    "options", [{}, {"temp": 0.7}, {"top_k": 3}, {"top_p": 0.6}, {"temp": 2.0, "top_k": 3, "top_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    options = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1234, **options}
    n = 20_000
    sampler = Sampler(**options)
    counts = np.bincount([sampler.sample(LOGITS) for _ in range(n)], minlength=4)
    for i in range(4):
        p = distribution(LOGITS, **options).get(i, 0.0)
        assert abs(counts[i] - n * p) <= 5 * math.sqrt(n * p * (1 - p))


def test_draws_are_the_inverse_of_the_cumulative_distribution() -> None:
    """One number of PCG64 a draw, looked up in the running sum of the probabilities by id."""
    numbers = np.random.Generator(np.random.PCG64(7))
    edges = list(itertools.accumulate(P))
    sampler = Sampler(temp=1.0, top_k=0, top_p=1.0, seed=7)
    assert [sampler.sample(LOGITS) for _ in range(500)] == [bisect.bisect_right(edges, numbers.random()) for _ in range(500)]


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(temp=1.0, top_k=0, top_p=1.0, seed=0)

    class Edge:
        u = 0.0

        def random(self) -> float:
            return self.u

    monkeypatch.setattr(sampler, "_rng", edge := Edge())
    logits = np.array([-900.0, 0.0, 0.3, -900.0])
    assert sampler.sample(logits) == 1
    edge.u = math.nextafter(1.0, 0.0)
    assert sampler.sample(logits) == 2


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (40, 1.0), (257, 1.0), (0, 0.3), (0, 0.95), (0, 0.99999), (300, 0.9)])
def test_cut_sets_of_a_large_vocabulary(top_k: int, top_p: float) -> None:
    """Against sorting everything, with many ties."""
    rng = np.random.default_rng(5)
    for scale in (0.1, 1.0, 4.0):
        logits = np.round(rng.standard_normal(5000) * scale, 2)
        ranked = sorted(range(5000), key=lambda i: (-logits[i], i))[: top_k or None]
        weights = [math.exp(logits[i]) for i in ranked]
        total, kept, running = math.fsum(weights), [], 0.0
        for i, w in zip(ranked, weights, strict=True):
            kept.append(i)
            running += w
            if top_p < 1 and running >= top_p * total:
                break
        assert set(distribution(logits, top_k=top_k, top_p=top_p)) == set(kept)


def test_seed_makes_draws_repeat() -> None:
    def draws(sampler: Sampler) -> list[int]:
        return [sampler.sample(LOGITS) for _ in range(50)]

    numpy_seed: Any = np.int64(42)
    a, b, c = Sampler(seed=42, top_p=1.0), Sampler(seed=numpy_seed, top_p=1.0), Sampler(seed=43, top_p=1.0)
    first = draws(a)
    assert first == draws(b) != draws(c)
    assert a.seed == b.seed == 42 and type(b.seed) is int
    assert draws(a) != first
    a.reset()
    assert draws(a) == first
    assert draws(Sampler(seed=2**80)) == draws(Sampler(seed=2**80))


def test_without_a_seed_the_one_in_use_is_shown() -> None:
    samplers = [Sampler(top_p=1.0) for _ in range(4)]
    assert len({s.seed for s in samplers}) > 1
    again = Sampler(top_p=1.0, seed=samplers[0].seed)
    assert [samplers[0].sample(LOGITS) for _ in range(50)] == [again.sample(LOGITS) for _ in range(50)]


def test_greedy_and_sampled_calls_do_not_touch_the_logits() -> None:
    logits = LOGITS.copy()
    Sampler(temp=0.0).sample(logits)
    Sampler(temp=0.1, seed=1).sample(logits)
    assert (logits == LOGITS).all()


def test_defaults() -> None:
    sampler = Sampler(seed=3)
    assert repr(sampler) == "Sampler(temp=0.8, top_k=40, top_p=0.95, seed=3)"
    assert sampler.params == SamplerParams(0.8, 40, 0.95, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "top_p is 0.0; legal: more than 0, at most 1"),
        ({"top_p": -0.5}, "top_p is -0.5"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"top_p": "x"}, "top_p is 'x'"),
        ({"top_k": -1}, "top_k is -1; legal: 0 or more"),
        ({"top_k": 1.5}, "top_k is 1.5; legal: an integer"),
        ({"top_k": True}, "top_k is True; legal: an integer"),
        ({"min_keep": -1}, "min_keep is -1"),
        ({"temp": NAN}, "temp is nan; legal: a finite number"),
        ({"temp": INF}, "temp is inf"),
        ({"temp": None}, "temp is None"),
        ({"seed": -1}, "seed is -1; legal: 0 or more"),
        ({"seed": 1.0}, "seed is 1.0; legal: an integer"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_illegal_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamError, match=f"^{message}"):
        Sampler(**options)


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        ([1.0, NAN, 2.0, NAN], ParamError, "NaN at 2 of 4 tokens, first at id 1"),
        ([INF, NAN], ParamError, "NaN at 1 of 2 tokens, first at id 1"),
        ([-INF, -INF], ParamError, "all 2 logits are -inf"),
        ([], ShapeError, r"shape \(0,\); legal: one row"),
        ([[1.0, 2.0]], ShapeError, r"shape \(1, 2\); legal: one row"),
        (1.0, ShapeError, r"shape \(\); legal: one row"),
        ([1j], DTypeError, "complex128; legal: real numbers"),
        (["a"], DTypeError, "legal: real numbers"),
    ],
    ids=["nan", "nan-and-inf", "all-minus-inf", "empty", "matrix", "scalar", "complex", "text"],
)
def test_logits_that_are_refused(temp: float, logits: Any, error: type[PyggmlError], message: str) -> None:
    with pytest.raises(error, match=message):
        Sampler(temp=temp, seed=0).sample(np.array(logits))
