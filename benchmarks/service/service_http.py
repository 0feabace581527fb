"""What a client of `echo2 serve` waits for over HTTP, and the CPU it costs: this tree beside another commit, in turn.

    make bench-service_http ARGS='6bf8b6a [--rounds 30] [--out FILE]'

Both services run all the time, on loopback, each with its own code, one thread a process and a .16 M Qwen3. The client
needs no SDK: one connection a service, which stays open. Each round does everything once on each side, whose turn comes
first alternates, and the first rounds are not counted. Figures are medians with quartiles: milliseconds until the last
answer, CPU milliseconds of all processes of the service, and the ratios of the two sides within a round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import recording
import service as shapes
from cpu_time import cpu_seconds
from service_beside_skyrl import BASE, Server, make_base, start_ours
from two_commits import REPOSITORY, checked_out

from echo2_service import tinker_pb2 as pb

SIZE = "0.2M"
WARM_UP_ROUNDS = 3
#: What a service still does when it has answered is part of what the answer costs.
AFTERWARDS_SECONDS = 0.01
JSON, PROTOBUF = "application/json", "application/x-protobuf"


class Side:
    """A service, an adapter that is trained there, and a sampler of it. What is asked gives its seconds."""

    def __init__(self, server: Server, key: str) -> None:
        self.server, self.key, self.rng = server, key, random.Random(0)
        self.connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        self.operations = self.samples = 0
        session = self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        self.model = self.outcome(self.post("create_model", model))["model_id"]
        self.new_sampler()

    def post(self, method: str, body: dict[str, Any] | bytes) -> Any:
        """The answer: bytes where it is protobuf.

        Raises:
            SystemExit: the service refuses it, or failed at it.
        """
        kind, content = (PROTOBUF, body) if isinstance(body, bytes) else (JSON, json.dumps(body).encode())
        headers = {"x-api-key": self.key, "content-type": kind, "accept": f"{PROTOBUF}, {JSON}"}
        self.connection.request("POST", f"/api/v1/{method}", content, headers)
        response = self.connection.getresponse()
        answer = response.read()
        told = json.loads(answer) if response.headers["content-type"].startswith(JSON) else answer
        if response.status != 200 or (isinstance(told, dict) and "error" in told):
            raise SystemExit(f"{method} at {self.server.url}: {response.status} {answer[:500]!r}")
        return told

    def outcome(self, submitted: dict[str, Any]) -> Any:
        return self.post("retrieve_future", {"request_id": submitted["request_id"]})

    def operation(self) -> int:
        self.operations += 1
        return self.operations

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, shapes.SIZES[SIZE][2]) for _ in range(count)]

    def step(self) -> float:
        """8 x 128 tokens, and AdamW; both submitted before the first is waited for."""
        request = pb.ForwardBackwardRequest(model_id=self.model, seq_id=self.operation(), loss_fn="cross_entropy")
        for _ in range(8):
            tokens, datum = self.tokens(129), request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
            targets, weights = np.array(tokens[1:], "<i8").tobytes(), np.ones(128, "<f4").tobytes()
            inputs = datum.loss_fn_inputs
            inputs["target_tokens"].CopyFrom(pb.Tensor(dense=targets, dtype=pb.DTYPE_INT64, shape=[128]))
            inputs["weights"].CopyFrom(pb.Tensor(dense=weights, dtype=pb.DTYPE_FLOAT32, shape=[128]))
        adam = {"model_id": self.model, "seq_id": self.operation(), "adam_params": {"learning_rate": 1e-4}}
        content = request.SerializeToString()
        began = time.perf_counter()
        submitted = [self.post("forward_backward", content), self.post("optim_step", adam)]
        for each in submitted:
            self.outcome(each)
        return time.perf_counter() - began

    def sample(self, count: int) -> float:
        """So many tokens behind 32."""
        self.samples += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": self.tokens(32)}]}
        params = {"max_tokens": count, "temperature": 1.0, "stop": []}  # no stop string, and no token of the model
        request = {"sampling_session_id": self.sampler, "seq_id": self.samples, "num_samples": 1}
        request |= {"prompt": prompt, "sampling_params": params}
        began = time.perf_counter()
        answer = self.outcome(self.post("asample", request))
        seconds = time.perf_counter() - began
        sampled = len(pb.SampleResponse.FromString(answer).sequences[0].tokens) // 4
        if sampled != count:
            raise SystemExit(f"{self.server.url} sampled {sampled} tokens where {count} were asked for")
        return seconds

    def new_sampler(self) -> float:
        """The weights as they are, and a token from them."""
        number = self.operation()
        request = {"model_id": self.model, "seq_id": number, "sampling_session_seq_id": number}
        began = time.perf_counter()
        self.sampler = self.outcome(self.post("save_weights_for_sampler", request))["sampling_session_id"]
        self.sample(1)
        return time.perf_counter() - began


KINDS: dict[str, Callable[[Side], float]] = {
    "step_8x128": Side.step,
    "sample_1_token": lambda side: side.sample(1),
    "sample_16_tokens": lambda side: side.sample(16),
    "sample_64_tokens": lambda side: side.sample(64),
    "new_sampler": Side.new_sampler,
}


@dataclass
class Times:
    """Of one kind at one side, by round, in milliseconds."""

    waited: list[float]
    cpu: list[float]

    def add(self, side: Side, action: Callable[[Side], float]) -> None:
        before = cpu_seconds(side.server.process.pid)
        seconds = action(side)
        time.sleep(AFTERWARDS_SECONDS)
        self.cpu.append(1e3 * (cpu_seconds(side.server.process.pid) - before))
        self.waited.append(1e3 * seconds)

    def counted(self) -> Times:
        return Times(self.waited[WARM_UP_ROUNDS:], self.cpu[WARM_UP_ROUNDS:])


def compared(old: Times, new: Times) -> dict[str, dict[str, float]]:
    """Median and quartiles of both sides, and of the ratios within a round."""
    found = {}
    for name, before, after in (("ms", old.waited, new.waited), ("cpu_ms", old.cpu, new.cpu)):
        found[f"old_{name}"], found[f"new_{name}"] = shapes.spread(before), shapes.spread(after)
        found[f"{name}_new_over_old"] = shapes.spread([b / a for a, b in zip(before, after, strict=True)])
    return found


def to_text(kind: str, found: dict[str, dict[str, float]]) -> Iterator[str]:
    for name, text in (("ms", "ms"), ("cpu_ms", "CPU ms")):
        values = [found[key] for key in (f"old_{name}", f"new_{name}", f"{name}_new_over_old")]
        spreads = ["{median:.2f} [{low:.2f}, {high:.2f}]".format(**each) for each in values]
        yield "{:16}  {:6}  old {:24}  new {:24}  ratio {}".format(kind, text, *spreads)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit to compare this tree with")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="echo2-http-") as text, ExitStack() as running:
        folder, sides = Path(text), list[Side]()
        for tree in (running.enter_context(checked_out(options.old, folder / "tree")), REPOSITORY):
            place = folder / f"side-{len(sides)}"
            parameters = make_base(place, SIZE)
            server = start_ours(place, tree)
            running.callback(server.end)
            sides.append(Side(server, (place / "service" / "api-key").read_text().strip()))
        times = {kind: [Times([], []) for _ in sides] for kind in KINDS}
        for number in range(WARM_UP_ROUNDS + options.rounds):
            for kind, action in KINDS.items():
                for at in (0, 1) if number % 2 else (1, 0):
                    times[kind][at].add(sides[at], action)
    found = {kind: compared(*(each.counted() for each in of_sides)) for kind, of_sides in times.items()}
    for kind, figures in found.items():
        print("\n".join(to_text(kind, figures)))
    settings = {"old": options.old, "rounds": options.rounds, "parameters": parameters}
    print(f"written to {recording.save('service_http', {**settings, 'kinds': found}, options.out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
