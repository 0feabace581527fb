"""A stand-in for a vLLM server: answers as vLLM 0.32.0's source says, and computes nothing.

Its "model" gives token (number of weights + position) modulo the vocabulary, where the number of weights is the first
float of `model.safetensors`, so that a test sees which weights a token is of. Run as a program it takes vLLM's own
arguments, as far as echo2 gives them; a test can also serve it within its own process.

Source: vllm/entrypoints/scale_out/token_in_token_out/{protocol,serving}.py, vllm/entrypoints/rl/online/api_router.py,
vllm/entrypoints/serve/dev/rpc/api_router.py, vllm/entrypoints/openai/models/serving.py,
vllm/entrypoints/serve/dev/sleep/api_router.py, vllm/lora/worker_manager.py.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import select
import socketserver
import struct
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

VOCAB = 31
END = 1
WAIT_SECONDS = 30.0
#: Between two looks of a request that waits at whether its caller is still there.
LOOK_SECONDS = 0.01


class Adapter(NamedTuple):
    """An adapter as a request keeps it to its end: with `is_read_again` it is read before each token."""

    id: int
    path: str
    is_read_again: bool


class Served:
    """State of the server. `hold_at`: the token at which a request waits for other weights than its first (0: none);
    `wrong`: what it does wrong, by name; `routed`: layers, experts chosen and experts, if it returns them."""

    def __init__(
        self, model: str, wrong: str = "", hold_at: int = 0, routed: tuple[int, int, int] | None = None
    ) -> None:
        self.changed = threading.Condition()
        self.is_paused, self.is_closed = False, False
        self.label, self.number = "default", weights_number(Path(model) / "model.safetensors")
        self.adapters: dict[str, Adapter] = {}
        self.held: dict[int, int] = {}  # by adapter's id: its first float, as it was when it was read
        self.wrong, self.hold_at, self.routed = wrong, hold_at, routed
        self.num_running = self.num_aborted = 0
        self.requests: list[dict[str, Any]] = []
        self.takes_experts = self.is_asleep = False
        self.can_sleep = True
        self.num_answers = self.num_adapters = 0

    def post(self, path: str, body: Any, is_gone: Any) -> tuple[int, Any]:
        """Status and answer."""
        if self.wrong == f"refuses {path}":
            self.wrong = ""
            return 500, {"error": {"message": "as the test wants", "code": 500}}
        if path == "/inference/v1/generate":
            return self.generate(body, is_gone)
        with self.changed:
            if path == "/pause":
                self.is_paused = True
            elif path == "/resume":
                self.is_paused = False
            elif path == "/sleep" and self.can_sleep:
                self.is_paused = self.is_asleep = True
            elif path == "/wake_up":
                self.is_paused = self.is_asleep = False
            elif path in ("/sleep", "/collective_rpc", "/v1/load_lora_adapter") and (
                self.is_asleep or path == "/sleep"
            ):
                return 500, {"error": {"message": "there are no weights on the GPU", "code": 500}}
            elif path == "/collective_rpc" and body["method"] == "reload_weights":
                self.number = weights_number(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            elif path == "/collective_rpc" and body["method"] == "list_loras":
                return 200, {"results": [str(set(self.held))]}
            elif path == "/collective_rpc" and body["method"] == "remove_lora":
                self.held.pop(*body["args"])
            elif path == "/update_weight_version":
                self.label = body["new_version"]
            elif path.endswith("_lora_adapter"):
                return self.change_adapters(path, body)
            else:
                return 404, {"detail": "Not Found"}
            self.changed.notify_all()
        return 200, {"status": "ok"}

    def change_adapters(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and answer of the routes that load an adapter, and that forget its name."""
        name, is_in_place = body["lora_name"], body.get("load_inplace", False)
        known = self.adapters.get(name)
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(name, None) is None:
                return 404, {"error": {"message": f"The lora adapter '{name}' cannot be found.", "code": 404}}
            return 200, {"status": "ok"}
        file = Path(body["lora_path"]) / "adapter_model.safetensors"
        if b".experts." in file.read_bytes() and not (self.takes_experts and body.get("is_3d_lora_weight")):
            return 400, {"error": {"message": "the adapter contains fused 3D MoE weights", "code": 400}}
        if known is not None and not is_in_place:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded.", "code": 400}}
        self.num_adapters += known is None
        adapter = Adapter(self.num_adapters if known is None else known.id, body["lora_path"], is_in_place)
        self.held[adapter.id] = weights_number(file)
        self.adapters[name] = adapter
        return 200, {"status": "ok"}

    def drawn_from(self, adapter: Adapter | None) -> int:
        """What the next token counts from. An adapter that is not held is read, and so is one that is always read."""
        if adapter is None:
            return self.number
        if adapter.is_read_again or adapter.id not in self.held:
            self.held[adapter.id] = weights_number(Path(adapter.path) / "adapter_model.safetensors")
        return self.held[adapter.id]

    def get(self, path: str) -> tuple[int, Any]:
        """Status and answer."""
        if path == "/health":
            return 200, {}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        adapters = [{"id": name, "root": one.path} for name, one in self.adapters.items()]
        return 200, {"object": "list", "data": [{"id": "m", "root": "m", "max_model_len": 64}, *adapters]}

    def generate(self, body: Any, is_gone: Any) -> tuple[int, Any]:
        """Draw tokens until an end token or `max_tokens`."""
        params, tokens, spans = body["sampling_params"], [], []
        adapter = self.adapters.get(body.get("model"))
        if adapter is None and body.get("model") is not None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        with self.changed:
            self.requests.append(body)
            self.num_running += 1
            try:
                while len(tokens) < params["max_tokens"] and not (set(tokens) & set(params.get("stop_token_ids", ()))):
                    self.changed.wait_for(lambda: not self.is_paused or self.is_closed, WAIT_SECONDS)
                    if is_gone() or self.is_closed:
                        self.num_aborted += 1
                        return 499, {}
                    is_held = 0 < self.hold_at == len(tokens) and spans[0]["version"] == self.label
                    if self.is_paused or is_held:
                        self.changed.wait(LOOK_SECONDS)
                        continue
                    if not spans or spans[-1]["version"] != self.label:
                        spans.append({"version": self.label, "start": len(tokens), "end": 0})
                    tokens.append((self.drawn_from(adapter) + len(tokens)) % VOCAB)
            except FileNotFoundError:
                return 500, {"error": {"message": "EngineDeadError", "code": 500}}
            finally:
                self.num_running -= 1
        return 200, {
            "request_id": "generate-tokens-1",
            "choices": [self.choice(body["token_ids"], tokens, spans, params)],
        }

    def choice(self, prompt: list[int], tokens: list[int], spans: list[Any], params: Any) -> dict[str, Any]:
        """As `GenerateTokensChoice`. Under processed logprobs a token that only one could be has logprob 0; top-k of 1
        leaves both of two tokens whose logits are equal, as logits in bfloat16 often are."""
        logprob = 0.0 if params.get("top_k") == 1 and self.wrong != "raw logprobs" else -0.5
        if self.wrong == "tied logits" and not params.get("logit_bias"):
            logprob = -math.log(2)
        for span, following in zip(spans, [*spans[1:], None], strict=True):
            span["end"] = following["start"] if following else len(tokens)
        num_top = max(1, params["logprobs"])
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": ranked(token, num_top, params)}
            for token in tokens
        ]
        choice = {
            "index": 0,
            "finish_reason": "stop" if tokens[-1] in params.get("stop_token_ids", ()) else "length",
            "token_ids": tokens,
            "logprobs": {"content": content},
            "sampling_mask": None,
            "weight_versions": spans,
        }
        if self.routed is not None:
            choice["routed_experts"] = experts(len(prompt) + len(tokens) - 1, *self.routed)
        return self.spoilt(choice)

    def spoilt(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The choice, wrong as the test wants."""
        self.num_answers += 1
        if self.num_answers == 1 and self.wrong not in ("text", "no logprob"):
            return choice  # the first request asks what the server can do
        match self.wrong:
            case "another version":
                choice["weight_versions"][0]["version"] = "policy-1.99"
            case "no versions":
                choice["weight_versions"] = []
            case "late versions":
                choice["weight_versions"][0]["start"] = 1
            case "foreign token":
                choice["token_ids"][-1] = VOCAB
            case "negative token":
                choice["token_ids"][0] = -1
            case "huge logprob":
                choice["logprobs"]["content"][0]["logprob"] = 1.0
            case "no logprob":
                choice["logprobs"]["content"].pop()
            case "clamped logprob":
                choice["logprobs"]["content"][0]["logprob"] = -9999.0
            case "too long":
                choice["token_ids"] *= 99
                choice["logprobs"]["content"] *= 99
            case "breaks off":
                choice["token_ids"], choice["logprobs"]["content"] = (
                    choice["token_ids"][:1],
                    [{"token_id": 5, "logprob": -1.0}],
                )
            case "text":
                choice["token_ids"] = "1, 2"
            case "no routes":
                choice["routed_experts"] = None
            case "routes of fewer tokens":
                choice["routed_experts"] = experts(1, 2, 2, 4)
            case "a foreign expert":
                choice["routed_experts"] = experts(7, 2, 2, 999)
            case "one expert twice":
                choice["routed_experts"] = experts(7, 2, 2, 1)
            case "a huge file":
                choice["routed_experts"] = npy(b"", (1 << 40, 2, 2))
            case "no file":
                choice["routed_experts"] = "AAAA"
            case "mask without the token":
                choice["sampling_mask"] = [[(token + 1) % VOCAB] for token in choice["token_ids"]]
            case "wide mask":
                choice["sampling_mask"] = [list(range(VOCAB)) for _ in choice["token_ids"]]
            case "oversized":
                choice["padding"] = "x" * (1 << 20)
        return choice


def experts(num_tokens: int, layers: int, chosen: int, number: int) -> str:
    """As `routed_experts`: a token's experts are its place and those behind, of so many."""
    ids = bytes(
        (token + layer + place) % number % 256
        for token in range(num_tokens)
        for layer in range(layers)
        for place in range(chosen)
    )
    return npy(ids, (num_tokens, layers, chosen))


def npy(data: bytes, shape: tuple[int, ...]) -> str:
    """An .npy file of uint8, base64."""
    header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data).decode()


def ranked(token: int, count: int, params: Any) -> list[dict[str, Any]]:
    """The drawn token first, then others by rank; with top-k those that are cut have no probability left."""
    kept = params.get("top_k") or VOCAB
    return [
        {"token_id": (token + place) % VOCAB, "logprob": -0.5 - place if place < kept else -9999.0, "rank": place + 1}
        for place in range(min(count, VOCAB))
    ]


def weights_number(path: Path) -> int:
    """The first float of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return int(struct.unpack_from("<f", data, start)[0])


class Handler(BaseHTTPRequestHandler):
    """One connection. `served` is set by `serve`."""

    served: Served
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "local"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(*self.served.get(urlsplit(self.path).path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer(*self.served.post(urlsplit(self.path).path, json.loads(body or b"null"), self.is_gone))

    def is_gone(self) -> bool:
        return bool(select.select([self.connection], [], [], 0)[0])

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True


class TcpServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


def handler_of(served: Served) -> type[Handler]:
    """The handler class for this state."""
    return type("Bound", (Handler,), {"served": served})


def main() -> None:
    """Serve as a program. `--pids`: a file that takes the id of each life of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--hold-at", type=int, default=0)
    parser.add_argument("--wrong", default="")
    parser.add_argument("--pids", default="")
    arguments, others = parser.parse_known_args()
    if arguments.wrong == "dies at start":
        raise ValueError("no kernel for head_dim 24")
    if arguments.pids:
        with open(arguments.pids, "a") as file:
            file.write(f"{os.getpid()}\n")
    served = Served(arguments.model, arguments.wrong, arguments.hold_at)
    served.can_sleep = "--enable-sleep-mode" in others
    served.takes_experts = "--enable-mixed-moe-lora-format" in others
    UnixServer(arguments.uds, handler_of(served)).serve_forever()


if __name__ == "__main__":
    main()
