"""A model's forward pass written out in float64 NumPy, token by token, straight from the file's keys and tensors.

Shares nothing with the engine but the GGUF reader: the oracle for architectures, multipliers, groups and RoPE.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyggml.gguf import GGUFFile


def rms_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def mamba2(w: dict[str, np.ndarray], x: np.ndarray, d_state: int, n_group: int, n_head: int, eps: float,
           conv: np.ndarray | None = None, ssm: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [T, n_embd] -> y, conv state [channels, d_conv - 1], ssm state [n_head, head_dim, d_state]."""
    d_inner = w["ssm_out.weight"].shape[1]
    head_dim, d_conv = d_inner // n_head, w["ssm_conv1d.weight"].shape[1]
    conv_dim = d_inner + 2 * n_group * d_state
    conv = np.zeros((conv_dim, d_conv - 1)) if conv is None else conv.copy()
    h = np.zeros((n_head, head_dim, d_state)) if ssm is None else ssm.copy()
    out = []
    for token in x:
        proj = w["ssm_in.weight"] @ token
        z, xbc, dt = proj[:d_inner], proj[d_inner:d_inner + conv_dim], proj[d_inner + conv_dim:]
        window = np.concatenate([conv, xbc[:, None]], axis=1)
        conv = window[:, 1:]
        act = silu((window * w["ssm_conv1d.weight"]).sum(1) + w["ssm_conv1d.bias"])
        xs = act[:d_inner].reshape(n_head, head_dim)
        group = np.arange(n_head) // (n_head // n_group)
        b = act[d_inner:d_inner + n_group * d_state].reshape(n_group, d_state)[group]
        c = act[d_inner + n_group * d_state:].reshape(n_group, d_state)[group]
        delta = softplus(dt + w["ssm_dt.bias"])
        h = h * np.exp(delta * w["ssm_a"].ravel())[:, None, None] + (delta[:, None] * xs)[:, :, None] * b[:, None, :]
        y = (h * c[:, None, :]).sum(-1) + w["ssm_d"].ravel()[:, None] * xs
        gated = (silu(z) * y.ravel()).reshape(n_group, -1)
        if "ssm_norm.weight" in w:
            gated = rms_norm(gated, eps) * w["ssm_norm.weight"].reshape(n_group, -1)
        out.append(w["ssm_out.weight"] @ gated.ravel())
    return np.stack(out), conv, h


def rope_norm(x: np.ndarray, pos: np.ndarray, base: float) -> np.ndarray:
    """x [T, heads, d], adjacent pairs rotated."""
    d = x.shape[-1]
    angle = pos[:, None] * base ** (-np.arange(0, d, 2) / d)[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def attention(w: dict[str, np.ndarray], x: np.ndarray, n_head: int, n_head_kv: int, scale: float | None, rope_base: float | None) -> np.ndarray:
    t = len(x)
    q, k, v = ((x @ w[f"attn_{n}.weight"].T).reshape(t, h, -1) for n, h in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)))
    if rope_base is not None:
        q, k = rope_norm(q, np.arange(t), rope_base), rope_norm(k, np.arange(t), rope_base)
    group = np.arange(n_head) // (n_head // n_head_kv)
    s = np.einsum("ihd,jhd->hij", q, k[:, group]) * (scale if scale is not None else q.shape[-1] ** -0.5)
    s = np.where(np.tril(np.ones((t, t), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v[:, group]).reshape(t, -1) @ w["attn_output.weight"].T


def forward(f: GGUFFile, ids: list[int]) -> np.ndarray:
    """Logits [T, n_vocab] of a file with float weights."""
    arch = f.metadata["general.architecture"]

    def key(name: str, default: Any = None) -> Any:
        return f.metadata.get(f"{arch}.{name}", default)

    def per_layer(name: str, il: int) -> int:
        v = key(name, 0)
        return int(v if isinstance(v, int) else v[il])

    arrays = {n: np.asarray(f.array(n), np.float64) for n in f.tensors}
    eps = key("attention.layer_norm_rms_epsilon")
    x = arrays["token_embd.weight"][ids] * key("embedding_scale", 1.0)
    res = key("residual_scale", 1.0)
    rope = key("rope.freq_base", 10000.0) if arch == "granitehybrid" and key("rope.scaling.finetuned", True) else None
    for il in range(key("block_count")):
        w = {n.split(".", 2)[2]: a for n, a in arrays.items() if n.startswith(f"blk.{il}.")}
        cur = rms_norm(x, eps) * w["attn_norm.weight"]
        if "ssm_in.weight" in w:
            cur = mamba2(w, cur, key("ssm.state_size"), key("ssm.group_count"), key("ssm.time_step_rank"), eps)[0]
        elif "attn_q.weight" in w:
            cur = attention(w, cur, per_layer("attention.head_count", il), per_layer("attention.head_count_kv", il), key("attention.scale"), rope)
        else:
            cur = np.square(np.maximum(cur @ w["ffn_up.weight"].T, 0)) @ w["ffn_down.weight"].T
        x = x + res * cur
        if arch == "granitehybrid":
            cur = rms_norm(x, eps) * w["ffn_norm.weight"]
            cur = (silu(cur @ w["ffn_gate.weight"].T) * (cur @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
            x = x + res * cur
    x = rms_norm(x, eps) * arrays["output_norm.weight"]
    return x @ arrays.get("output.weight", arrays["token_embd.weight"]).T / key("logit_scale", 1.0)
