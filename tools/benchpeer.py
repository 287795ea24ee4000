"""llama.cpp as the peer of a bench: a process with llama-cpp-python that runs the same cases when told to, and waits in between."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml.errors import PyggmlError
from pyggml.tools.benchcases import Case
from pyggml.tools.benchrun import Sample
from pyggml.tools.common import note

SETTLE_SECONDS = 0.05  # after a run, in which the other engine's threads stop spinning
FLASH_ATTN_TYPES = {"auto": -1, "off": 0, "on": 1}  # llama.cpp's numbers
SERVER = Path(__file__).with_name("peerserver.py")


class PeerError(PyggmlError):
    """The peer does not answer, or says that it cannot do what it was asked to."""


class Peer:
    """A running peer. Requests and replies are lines of JSON; it sleeps in a read between them."""

    def __init__(self, python: str) -> None:
        self.python = python
        try:
            # A session of its own: a Ctrl-C at the terminal is for this process, which ends the peer.
            self._process = subprocess.Popen([python, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
                                             start_new_session=True)
        except OSError as e:
            raise PeerError(f"--peer {python}: {e.strerror}") from None
        try:
            self.label = f"llama-cpp-python {self.ask({'do': 'hello'})['version']}"
        except PeerError:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"--peer {self.python}: the process ended with code {self._process.wait()}")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise PeerError(f"--peer {self.python}: it answered {line.strip()[:80]!r}; expected an object in JSON")
        if "error" in reply:
            raise PeerError(f"--peer {self.python}: {reply['error']}")
        return reply

    def lane(self, case: Case, ids: np.ndarray, warm: bool) -> PeerLane:
        """A case on the peer."""
        return PeerLane(self, case, ids, warm, self.label)

    def settle(self) -> None:
        """Wait until the threads of the engine that ran last are at rest."""
        time.sleep(SETTLE_SECONDS)

    def close(self) -> None:
        """End the process: it stops when it reads no more, unless it is in the middle of a run."""
        try:
            self._process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@dataclass(slots=True)
class PeerLane:
    """A case on the peer."""

    peer: Peer
    case: Case
    ids: np.ndarray
    warm: bool
    label: str

    def warm_up(self) -> None:
        """Load the model unless it is there, make the context, run once."""
        c, s = self.case, self.case.settings
        self.peer.ask({"do": "open", "model": s.model, "n_ctx": c.n_depth + c.n_prompt + c.n_gen, "n_batch": s.n_batch, "n_ubatch": s.n_ubatch,
                       "threads": s.threads, "threads_batch": s.threads_batch, "type_k": s.type_k, "type_v": s.type_v,
                       "flash_attn": FLASH_ATTN_TYPES[s.flash_attn]})
        if self.warm:
            self._run(c.n_depth, c.n_prompt, min(c.n_gen, 1))

    def run(self) -> Sample:
        """One repetition."""
        return self._run(self.case.n_depth, self.case.n_prompt, self.case.n_gen)

    def _run(self, n_depth: int, n_prompt: int, n_gen: int) -> Sample:
        ids = self.ids[:n_depth + n_prompt + n_gen].tolist()
        reply = self.peer.ask({"do": "run", "depth": ids[:n_depth], "prompt": ids[n_depth:n_depth + n_prompt], "gen": ids[n_depth + n_prompt:]})
        return Sample(reply["seconds"], reply["first_seconds"], np.frombuffer(base64.b64decode(reply["logits"]), np.float32))


def find_peer(python: str) -> Peer | None:
    """The peer of an interpreter; None, with a line on stderr, when it has no llama_cpp."""
    try:
        return Peer(python)
    except PeerError as e:
        note(f"note: {e}; the bench goes on without a peer")
        return None
