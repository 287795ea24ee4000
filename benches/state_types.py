"""What narrower types cost: quality against bytes of a sequence's state, for each form of the Mamba2 layers.

    python benches/state_types.py [-m FILE] [-f TEXT] [-c N] [--chunks N] > docs/reports/state-types.md

Types are those of the conv states, the SSM states and the conv weights; all sums and products inside a step are float32, and a state is cast
once, at its end. Logits: the text's first chunk, fed in ubatches and then token by token, so that the narrow states are read and written many
times; largest and rms distance from the float32 recurrence. Perplexity: as `pyggml perplexity` counts. As Markdown.
"""

from __future__ import annotations

import argparse
import io
import math

import numpy as np

import pyggml as pg
from pyggml.cpu.level import describe
from pyggml.models import demo_path, load_model
from pyggml.runtime.context import Context
from pyggml.tools.benchrun import cast_conv
from pyggml.tools.perplexity import perplexity, text_chunks

FORMS = (("scan", "f32"), ("ssd", "f32"), ("ssd-fused", "f32"), ("ssd-fused", "bf16"))
TYPES = (("f32", "f32", "f32"), ("f16", "f32", "f32"), ("f32", "f16", "f32"), ("f32", "bf16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "bf16"))
N_STEPS = 64  # tokens of the first chunk that are fed one by one


def logits_of(ctx: Context, ids: list[int]) -> np.ndarray:
    """Logits at every position of the first chunk: [n_tokens, n_vocab]."""
    ctx.reset()
    parts = [ctx.decode(ids[:-N_STEPS], all_logits=True), *(ctx.decode([i], all_logits=True) for i in ids[-N_STEPS:])]
    return np.concatenate(parts)


def main() -> None:
    """Measure and print the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", default=str(demo_path()), metavar="FILE", help="GGUF file, best of F32 weights (the bundled model)")
    p.add_argument("-f", default=str(demo_path().parent / "prompt.txt"), metavar="TEXT", help="text to score (the bundled prompt)")
    p.add_argument("-c", type=int, default=512, metavar="N", help="tokens per chunk (512)")
    p.add_argument("--chunks", type=int, metavar="N", help="score the first N chunks only (all)")
    args = p.parse_args()
    m = describe()
    print(f"# Types of states and conv weights\n\n{m['cpu']}, level {m['level']}; pyggml {pg.__version__}; {args.m.rpartition('/')[2]}, "
          f"chunks of {args.c} tokens, ubatch 128. `python benches/state_types.py -m ... -f ... -c {args.c}`\n")
    print("| form | products | conv states | SSM states | conv weights | state bytes | max dlogit | rms dlogit | PPL | +/- |\n"
          "|---|---|---|---|---|--:|--:|--:|--:|--:|")
    want: np.ndarray | None = None
    for type_r, type_s, type_conv in TYPES:
        model = load_model(args.m)
        cast_conv(model, type_conv)
        chunks = text_chunks(model, args.f, args.c, args.chunks)
        for form, precision in FORMS:
            ctx = model.context(n_ctx=args.c, n_ubatch=128, mamba2=form, ssd_precision=precision, type_k="f32", type_v="f32",
                                type_r=type_r, type_s=type_s)
            got = logits_of(ctx, chunks[0].tolist())
            want = got if want is None else want
            nll = perplexity(ctx, chunks, 1, io.StringIO())
            value, error = nll.mean(), nll.std(ddof=1) / math.sqrt(nll.size)
            far = np.abs(got - want)
            print(f"| {form} | {precision} | {type_r} | {type_s} | {type_conv} | {ctx.memory_bytes()['state']} | {far.max():.2g} | "
                  f"{math.sqrt(float((far.astype(np.float64) ** 2).mean())):.2g} | {math.exp(value):.4f} | {math.exp(value) * error:.4f} |", flush=True)


if __name__ == "__main__":
    main()
