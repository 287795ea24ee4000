"""The process behind `bench --peer`: llama.cpp through llama-cpp-python's low-level functions, told what to do by lines of JSON on stdin.

It is run as a file by an interpreter that need not have pyggml, so it imports nothing of it.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
import time
from typing import Any

GGML_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
ERROR_LEVEL = 4


class Failed(Exception):
    """What llama.cpp refuses."""


class Server:
    """One model and one context at a time."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.path: str | None = None
        self.model: Any = None
        self.ctx: Any = None
        self.n_batch = 0
        self.errors: list[str] = []
        self._log = lib.llama_log_callback(self._keep)  # kept alive: llama.cpp calls it
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        lib.llama_backend_init()

    def _keep(self, level: int, text: bytes, _user: Any) -> None:
        if level == ERROR_LEVEL:
            self.errors.append(text.decode(errors="replace").strip())

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        self.errors.clear()
        match request["do"]:
            case "hello":
                return {"version": self.lib.__version__}
            case "open":
                return self.open(request)
            case _:
                return self.run(request["depth"], request["prompt"], request["gen"])

    def open(self, r: dict[str, Any]) -> dict[str, Any]:
        """Load the model unless it is loaded, and make a context."""
        lib = self.lib
        self.close()
        if self.path != r["model"]:
            if self.model:
                lib.llama_model_free(self.model)
            params = lib.llama_model_default_params()
            params.n_gpu_layers = 0
            self.model, self.path = lib.llama_model_load_from_file(r["model"].encode(), params), r["model"]
            if not self.model:
                self.path = None
                raise Failed(f"{r['model']}: not loaded: {'; '.join(self.errors)}")
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = r["n_ctx"], r["n_batch"], r["n_ubatch"]
        p.n_threads, p.n_threads_batch = r["threads"], r["threads_batch"]
        p.type_k, p.type_v = GGML_TYPES[r["type_k"]], GGML_TYPES[r["type_v"]]
        p.flash_attn_type = r["flash_attn"]
        self.n_batch = r["n_batch"]
        self.ctx = lib.llama_init_from_model(self.model, p)
        if not self.ctx:
            raise Failed(f"no context: {'; '.join(self.errors)}")
        return {}

    def close(self) -> None:
        """Free the context."""
        if self.ctx:
            self.lib.llama_free(self.ctx)
        self.ctx = None

    def run(self, depth: list[int], prompt: list[int], gen: list[int]) -> dict[str, Any]:
        """Seconds of prompt and generation after an untimed depth, from an empty memory; the last logits."""
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.ctx), True)
        self.feed(depth)
        start = time.perf_counter()
        self.feed(prompt)
        first = time.perf_counter()
        for i, token in enumerate(gen):
            self.feed([token])
            if i == 0 and not prompt:
                first = time.perf_counter()
        seconds = time.perf_counter() - start
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        logits = ctypes.string_at(lib.llama_get_logits_ith(self.ctx, -1), 4 * n_vocab)
        return {"seconds": seconds, "first_seconds": first - start, "logits": base64.b64encode(logits).decode()}

    def feed(self, ids: list[int]) -> None:
        """Decode tokens, n_batch a call, and wait for them."""
        lib = self.lib
        for i in range(0, len(ids), self.n_batch):
            part = ids[i:i + self.n_batch]
            tokens = (lib.llama_token * len(part))(*part)  # named, as the batch holds its address alone
            code = lib.llama_decode(self.ctx, lib.llama_batch_get_one(tokens, len(part)))
            if code:
                raise Failed(f"llama_decode gave {code}: {'; '.join(self.errors)}")
        lib.llama_synchronize(self.ctx)


def main() -> int:
    """Answer lines until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what llama.cpp prints is no reply
    server: Server | None = None
    for line in sys.stdin:
        try:
            if server is None:
                import llama_cpp
                server = Server(llama_cpp)
            reply = server.answer(json.loads(line))
        except ImportError as e:
            reply = {"error": f"llama_cpp cannot be imported ({e}); pip install llama-cpp-python"}
        except Failed as e:
            reply = {"error": str(e)}
        print(json.dumps(reply), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
