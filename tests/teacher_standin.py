"""A stand-in for a teacher: a server of vLLM 0.32.0, as far as a teacher is asked, over real HTTP, with faults. It
computes with a model that the test has, too.

Source: vllm/entrypoints/openai/completion/{protocol,serving}.py, vllm/entrypoints/serve/tokenize/serving.py,
vllm/entrypoints/openai/models/serving.py; compared with vLLM itself by `tests/foreign/test_vllm_teacher.py`.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from http_standin import served

#: Seconds that a request hangs, unless the server closes before.
HANG_SECONDS = 60.0
Reply = tuple[int, Mapping[str, str], bytes]


class TeacherStandIn:
    """`module`: gives the logits. `texts`: of its tokens. `fault(path, n)`: what goes wrong with the nth request there:
    "" (nothing), a status ("500"), a status and its Retry-After ("429 1"), or a name below.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        texts: Sequence[str],
        fault: Callable[[str, int], str] = lambda path, n: "",
        models: Sequence[str] = ("the-teacher",),
        max_model_len: int = 256,
        max_logprobs: int = 20,
    ) -> None:
        self.module, self.texts, self.fault, self.models = module, texts, fault, models
        self.max_model_len, self.max_logprobs = max_model_len, max_logprobs
        self.num_asked, self.bodies, self.keys = Counter[str](), list[dict[str, Any]](), list[str]()
        self.closed, self._lock = threading.Event(), threading.Lock()
        self.url = ""

    def answer(self, path: str, data: bytes, headers: Mapping[str, str]) -> Reply:
        """Answer a request, or fail as the test wants."""
        body = json.loads(data) if data else {}
        with self._lock:
            self.num_asked[path] += 1
            self.keys.append(headers.get("authorization", ""))
            fault = self.fault(path, self.num_asked[path])
            if path == "/v1/completions":
                self.bodies.append(body)
        if fault == "hang":
            self.closed.wait(HANG_SECONDS)
        if fault == "cut":
            return 0, {}, b""
        if fault[:3].isdigit():
            status, _, retry_after = fault.partition(" ")
            told = {"error": {"message": f"as the test wants: {fault}"}}
            return int(status), {"retry-after": retry_after} if retry_after else {}, json.dumps(told).encode()
        if path == "/v1/models":
            cards = [{"id": name, "object": "model", "max_model_len": self.max_model_len} for name in self.models]
            return 200, {}, json.dumps({"object": "list", "data": cards}).encode()
        if body.get("model") not in self.models:
            return 404, {}, b'{"error": {"message": "The model does not exist."}}'
        if path == "/detokenize":
            return 200, {}, json.dumps({"prompt": "".join(self.texts[number] for number in body["tokens"])}).encode()
        return self._completion(body, fault) if path == "/v1/completions" else (404, {}, b"{}")

    def _completion(self, body: dict[str, Any], fault: str) -> Reply:
        read, top_k = body["prompt"], body["prompt_logprobs"]
        refusal = ""
        if top_k > self.max_logprobs:
            refusal = f"Requested prompt logprobs of {top_k}, which is greater than max allowed: {self.max_logprobs}"
        if max(read) >= len(self.texts):
            refusal = f"Token id {max(read)} is out of vocabulary"
        if len(read) + body["max_tokens"] > self.max_model_len:
            refusal = f"This model's maximum context length is {self.max_model_len} tokens."
        if refusal:
            return 400, {}, json.dumps({"error": {"message": refusal, "code": 400}}).encode()
        if fault == "oversized":
            return 200, {}, b" " * (8 << 20)
        if fault == "no json":
            return 200, {}, b"\xff{" * 9
        positions = self._positions(read, top_k)
        last = positions[-1]
        assert last is not None
        spoil: dict[str, Callable[[], object]] = {
            "short": positions.pop,
            "NaN": lambda: last[str(read[-1])].update(logprob=float("nan")),
            "infinite": lambda: last[str(read[-1])].update(logprob=-float("inf")),
            "above 0": lambda: last[str(read[-1])].update(logprob=0.5),
            "too likely": lambda: [one.update(logprob=-0.01) for one in last.values()],
            "another token": lambda: last.pop(str(read[-1])),
            "too many": lambda: last.update({str(9000 + n): {"logprob": -50.0} for n in range(top_k + 1)}),
            "a negative id": lambda: last.update({"-1": last.popitem()[1]}),
            "other ids": lambda: read.append(0),
        }
        spoil.get(fault, lambda: None)()
        choice = {"index": 0, "text": "x", "prompt_logprobs": positions, "prompt_token_ids": read, "token_ids": [0]}
        if fault == "no logprobs":
            choice["prompt_logprobs"] = None
        return 200, {}, json.dumps({"object": "text_completion", "choices": [choice]}).encode()

    def _positions(self, read: list[int], top_k: int) -> list[dict[str, dict[str, Any]] | None]:
        """Of each token its logprob, and those of the most likely, the first position without."""
        with torch.no_grad(), self._lock:
            logp = self.module(torch.tensor([read]), use_cache=False).logits[0].float().log_softmax(-1)
        found: list[dict[str, dict[str, Any]] | None] = [None]
        for row, token in zip(logp, read[1:], strict=False):
            ids = [token, *row.topk(min(top_k, len(row))).indices.tolist()]
            ranks = [int((row > row[token]).sum()) + 1, *range(1, top_k + 1)]
            told = zip(ids, ranks, strict=False)
            found.append({str(n): {"logprob": float(row[n]), "rank": r, "decoded_token": "x"} for n, r in told})
        return found


@contextmanager
def teacher_standin(*given: Any, **options: Any) -> Iterator[TeacherStandIn]:
    """Serve a stand-in on this machine while the context lasts; see `TeacherStandIn`. `port`: a given one."""
    port = options.pop("port", 0)
    teacher = TeacherStandIn(*given, **options)
    with served(teacher.answer, port) as url:
        teacher.url = f"{url}/v1"
        try:
            yield teacher
        finally:
            teacher.closed.set()
