"""Tools for testing ops and models: NMSE, running a case on a backend, and tiny random GGUF files of an architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import os

    from pyggml.cases import Case


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Sum of squared differences over the sum of squares of `want` (plain sum when that is 0), in float64. Equal infinities
    count as equal; any other non-finite difference gives inf.

    >>> nmse(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    0.0
    """
    a, b = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    a, b = np.where(same, 0.0, a), np.where(same, 0.0, b)
    scale = np.asarray(want, np.float64).ravel()
    power = float(np.sum(np.square(scale[np.isfinite(scale)])))
    err = float(np.sum(np.square(a - b)))
    if not np.isfinite(err):
        return float("inf")
    return err / power if power > 0 else err


def run_case(case: Case, backend: str = "cpu", **options: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run a case on a backend and on the reference, with the same stored inputs: (got, want), one array per output, and
    for an op that writes in place the whole written tensor."""
    from pyggml.backends import open_backend
    from pyggml.graph import Graph

    ins, outs = case.build()
    data = case.data()
    graph = Graph(outs)
    results = []
    for name, opts in ((backend, options), ("reference", {})):
        runner = open_backend(name, **opts).compile(graph)
        for t, value in zip(ins, data, strict=True):
            if t is not None and value is not None:
                runner.set(t, _as_input(t, value))
        runner.run()
        node = outs[0].node
        assert node is not None
        target = node.src[node.op.inplace] if node.op.inplace is not None else None
        results.append([runner.get(t) for t in (outs if target is None else (*outs, target))])
    return results[0], results[1]


def _as_input(t: Any, value: np.ndarray) -> np.ndarray:
    if t.dtype.is_int:
        return value.astype(t.dtype.np)
    return value if t.dtype.name == "f64" else value.astype(np.float32)


_SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.group_count": 2}
_COMMON = {"embedding_length": 32, "context_length": 4096, "attention.layer_norm_rms_epsilon": 1e-5, **_SSM}
TINY: dict[str, dict[str, Any]] = {
    "mamba2": {"block_count": 2, **_COMMON},
    "granitehybrid": {"block_count": 3, "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": np.array([0, 2, 0], np.int32),
                      "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 3.0, "attention.scale": 0.1, "rope.scaling.finetuned": False, **_COMMON},
    "nemotron_h": {"block_count": 4, "feed_forward_length": np.array([0, 48, 0, 0], np.int32), "attention.head_count": 4,
                   "attention.head_count_kv": np.array([0, 0, 2, 0], np.int32), **_COMMON},
}


def fabricate(arch: str, path: str | os.PathLike[str], *, seed: int = 0, drop: tuple[str, ...] = (), extra: dict[str, np.ndarray] | None = None,
              metadata: dict[str, Any] | None = None, **overrides: Any) -> None:
    """Write a tiny GGUF of an architecture with random float32 weights that keep activations sane and a byte-level vocabulary.

    `overrides` replace hyperparameters by their keys without the architecture (dots as `__`: `ssm__group_count=1`; None drops
    the key); `drop` leaves tensors out, `extra` adds some, `metadata` adds or replaces whole keys at the end, also by what
    contradicts the tensors. The architecture's own
    tables say which tensors there are.
    """
    from importlib import import_module

    from pyggml.gguf import write_gguf
    from pyggml.models.base import expand, read_hparams
    from pyggml.models.loader import layer_dims

    keys = {**TINY[arch], **{k.replace("__", "."): v for k, v in overrides.items()}}
    tokens = byte_vocab()
    meta: dict[str, Any] = {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items() if v is not None},
                            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
                            "tokenizer.ggml.token_type": np.array([3] + [1] * (len(tokens) - 1), np.int32), "tokenizer.ggml.merges": ["h e"],
                            "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": False}
    module = import_module(f"pyggml.models.{arch}")
    hp = read_hparams(module.HParams, arch, meta)
    kinds = module.kinds(hp)
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for t, il, name in expand(module.TENSORS, kinds):
        dims = layer_dims(hp, kinds[il], il, len(tokens))
        ne = [dims[d] for d in t.dims.split()]
        if not t.optional and name not in drop:
            tensors[name] = _random_weight(rng, name, ne)
    write_gguf(path, {**meta, **(metadata or {})}, {**tensors, **(extra or {})})


def byte_vocab() -> list[str]:
    """Token strings of a byte-level vocabulary: an end token, the 256 bytes in GPT-2's alphabet, one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return ["<|endoftext|>", *(chr(b if b in printable else next(rest)) for b in range(256)), "he"]


def _random_weight(rng: np.random.Generator, name: str, ne: list[int]) -> np.ndarray:
    shape = tuple(ne[::-1])
    if name.endswith("norm.weight"):
        w = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("ssm_a"):
        w = -rng.uniform(0.05, 2.0, shape)
    elif name.endswith(("bias", "ssm_d")):
        w = rng.normal(0, 0.5, shape)
    else:
        w = rng.normal(0, ne[0] ** -0.5, shape)
    return w.astype(np.float32)


def compile_cases() -> int:
    """Compile the kernels of every op's cases in one go, so that a test run does not ask for them one by one. Their number."""
    from pyggml.cases import all_cases
    from pyggml.cpu.compile import KernelSpec, kernels_for
    from pyggml.cpu.fuse import launch_of
    from pyggml.cpu.launch import launch
    from pyggml.cpu.team import TAPE_KERNELS
    from pyggml.graph import Graph
    from pyggml.plan import single_steps
    from pyggml.registry import choose_kernel, load_kernels

    load_kernels("cpu")
    specs: list[KernelSpec] = list(TAPE_KERNELS)
    for c in all_cases():
        for step in single_steps(Graph(c.build()[1])):
            if step.nodes[0].op.pointwise is not None:
                specs.append(launch_of(step).spec)
            else:
                found, _ = choose_kernel(step.nodes[0], "cpu")
                if found is not None:
                    specs.append(launch(found, step.nodes[0]).spec)
    kernels_for().addresses(specs)
    return len(specs)
