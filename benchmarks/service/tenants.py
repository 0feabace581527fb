"""A service with many tenants: memory and latency beside idle ones, sessions that come and go, and large bodies.

    make bench-tenants        # ARGS='--tenants 1 100 500 --sessions 2000 --out FILE'; --quick for a look

The service is that of `echo2 serve` (front, learner, sampler, reader; the tiny model, SQLite, no fleet), its front in
this process. Clients are another process, with the SDK's requests over HTTP and loopback.

    tenants    each has a session, a model of rank 8 with a step behind it, and a sampler of its own weights that has
               sampled once. Then all but one rest, as an SDK rests: with a heartbeat every 10 s. That one makes steps
               of 8 x 128 tokens and samples of 16: how long each takes, memory of each process, and CPU time of each
               for a step and a sample, of which the front's has the heartbeats
    sessions   opened, with a model each, and finished, one after the other; memory after each quarter
    bodies     four tenants send forward_backward bodies of 10 MB without a pause, protobuf and JSON, beside one that
               makes steps, and one whose heartbeats and `get_info` are timed. The learner refuses them at their first
               datum, for what is measured is the front: how late its event loop is, every 5 ms, and how long it
               computed meanwhile, which does not depend on other programs; CPU time; memory at most and afterwards
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import recording

from echo2_service import tinker_pb2 as pb
from echo2_service.commands.serve import base_directories, open_database
from echo2_service.fleet.machines import LocalBackend
from echo2_service.front.app import App
from echo2_service.front.http_server import HttpServer, listening
from echo2_service.front.request_guard import ApiKeys

BASE = "echo2/tiny"
PROTOBUF = {"content-type": "application/x-protobuf"}
TICK_SECONDS, HEARTBEAT_SECONDS, SMALL_CALL_SECONDS = 0.005, 10.0, 0.02
#: Ticks after which memory is looked at.
MEMORY_TICKS = 20
#: A silent connection is used again for so long.
KEPT_SECONDS = 30.0
BODY_BYTES = 10 << 20
#: Of a datum in a large body, and of the tiny model's vocabulary.
LENGTH, TOKENS = 4096, 256
SENDERS, THREADS = 4, 8


# ---- clients ---------------------------------------------------------------------------------------------------------


class Client:
    """A tenant's requests, over one connection."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._port, self._key, self._used, self.number = port, key, time.monotonic(), 0
        self.session = self.model = self.sampler = ""

    def heart(self) -> Client:
        """For its heartbeats: another connection."""
        other = Client(self._port, self._key)
        other.session, other.model = self.session, self.model
        return other

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        if time.monotonic() > self._used + KEPT_SECONDS:
            self._connection.close()  # the server may have done so; the next request opens another
        self._used = time.monotonic()
        self._connection.request("POST", f"/api/v1/{path}", data, {"x-api-key": self._key, **(headers or {})})
        answer = self._connection.getresponse()
        text = answer.read()
        is_json = "json" in answer.headers.get("content-type", "")
        return answer.status, json.loads(text) if is_json else text

    def ok(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        status, answer = self.post(path, body, headers)
        if status >= 300:
            raise SystemExit(f"{path}: {status} {answer}")
        return answer

    def result(self, future: Any) -> Any:
        status, answer = 408, None
        while status == 408:
            status, answer = self.post("retrieve_future", {"request_id": future["request_id"]})
        return answer

    def next(self) -> int:
        self.number += 1
        return self.number

    def open(self) -> None:
        self.session = self.ok("create_session")["session_id"]
        lora = {"rank": 8}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
        self.model, self.number = self.result(self.ok("create_model", body))["model_id"], 0

    def finish(self) -> None:
        self.ok(f"sessions/{self.session}/finish", {"reason": {"type": "completed"}})

    def step(self) -> None:
        """Both requests are made before the first is answered, as the SDK's clients do."""
        forward = self.ok("forward_backward", protobuf(self.model, self.next(), 8, 128), PROTOBUF)
        step = {"model_id": self.model, "seq_id": self.next(), "adam_params": {"learning_rate": 1e-4}}
        self.result(forward)
        self.result(self.ok("optim_step", step))

    def publish(self) -> None:
        body = {"model_id": self.model, "seq_id": self.next(), "sampling_session_seq_id": 0}
        self.sampler = self.result(self.ok("save_weights_for_sampler", body))["sampling_session_id"]

    def sample(self) -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(32))}]}
        body = {"sampling_session_id": self.sampler, "prompt": prompt, "sampling_params": {"max_tokens": 16}}
        self.result(self.ok("asample", body))

    def settle(self) -> None:
        """Do all that an idle tenant has done."""
        self.open()
        self.step()
        self.publish()
        self.sample()


def protobuf(model: str, number: int, num_data: int, length: int, first_target: int = 1) -> bytes:
    head = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    return head.SerializeToString() + protobuf_data(num_data, length, first_target)


@cache
def protobuf_data(num_data: int, length: int, first_target: int) -> bytes:
    message, tokens = pb.ForwardBackwardRequest(), np.arange(length) % TOKENS
    for place in range(num_data):
        datum, targets = message.data.add(), tokens.astype("<i8")
        targets[0] = first_target if place == 0 else 1
        datum.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        weights = np.ones(length, "<f4").tobytes()
        given = {"target_tokens": (targets.tobytes(), pb.DTYPE_INT64), "weights": (weights, pb.DTYPE_FLOAT32)}
        for name, (data, dtype) in given.items():
            datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=data, dtype=dtype, shape=[length]))
    return message.SerializeToString()


def as_json(model: str, number: int, num_data: int, length: int, first_target: int) -> bytes:
    """The same as JSON, as SDKs before protobuf send it."""
    head = json.dumps({"model_id": model, "seq_id": number, "forward_backward_input": None})
    return head.removesuffix("null}").encode() + json_data(num_data, length, first_target) + b"}"


@cache
def json_data(num_data: int, length: int, first_target: int) -> bytes:
    data = []
    for place in range(num_data):
        tokens = [token % TOKENS for token in range(length)]
        targets = [first_target if place == 0 else 1, *tokens[1:]]
        inputs = {
            "target_tokens": {"data": targets, "dtype": "int64", "shape": [length]},
            "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
        }
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        data.append({"model_input": prompt, "loss_fn_inputs": inputs})
    return json.dumps({"data": data, "loss_fn": "cross_entropy"}).encode()


def timed(action: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return found


def settle(clients: Sequence[Client]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(Client.settle, clients))


def rest(clients: Sequence[Client], is_over: threading.Event) -> None:
    """Send every client's heartbeat every 10 s, spread over them."""
    while not is_over.is_set():
        began = time.monotonic()
        for place, client in enumerate(clients):
            client.ok("session_heartbeat", {"session_id": client.session})
            if is_over.wait(max(0.0, began + HEARTBEAT_SECONDS * (place + 1) / len(clients) - time.monotonic())):
                return


def send_bodies(client: Client, times: int) -> list[float]:
    """Seconds until each is taken and its refusal is read."""
    of_protobuf, of_json = BODY_BYTES // (16 * LENGTH), BODY_BYTES // (14 * LENGTH)

    def one(make: Callable[..., bytes], num_data: int, headers: dict[str, str]) -> float:
        body = make(client.model, client.next(), num_data, LENGTH, TOKENS * 1000)
        began = time.perf_counter()
        answer = client.result(client.ok("forward_backward", body, headers))
        if "outside of" not in str(answer):
            raise SystemExit(f"a body of {len(body)} bytes: {str(answer)[:500]}")
        return time.perf_counter() - began

    for_json = {"content-type": "application/json"}
    kinds = ((protobuf, of_protobuf, PROTOBUF), (as_json, of_json, for_json))
    return [one(*kind) for _ in range(times) for kind in kinds]


def small_calls(client: Client, senders: Sequence[Future[Any]]) -> list[float]:
    """Seconds of small calls, one after the other, until all bodies are sent."""
    found = []
    while not all(sender.done() for sender in senders):
        found += timed(lambda: client.ok("session_heartbeat", {"session_id": client.session}), 1)
        found += timed(lambda: client.ok("get_info", {"model_id": client.model}), 1)
        time.sleep(SMALL_CALL_SECONDS)
    return found


def serve_orders(port: int, keys: list[str]) -> None:
    """The process of the clients: carries out the orders on stdin, one a line, and answers each with a line."""
    clients: list[Client] = []
    is_over, heartbeats = threading.Event(), None
    for line in sys.stdin:
        name, number = json.loads(line)
        found: Any = {}
        if name == "settle":
            is_over.set()
            if heartbeats is not None:
                heartbeats.join()
            new = [Client(port, key) for key in keys[len(clients) : number]]
            settle(new)
            clients += new
            is_over = threading.Event()
            heartbeats = threading.Thread(target=rest, args=([each.heart() for each in clients], is_over), daemon=True)
            heartbeats.start()
        elif name == "active":
            clients[0].step()  # not counted
            found = {"step": timed(clients[0].step, number), "sample": timed(clients[0].sample, number)}
        elif name == "sessions":
            one = Client(port, keys[-1])

            def come_and_go(one: Client = one) -> None:
                one.open()
                one.finish()

            found = {"seconds": sum(timed(come_and_go, number))}
        elif name == "bodies":
            # Made before, for all: while one is encoded, no other thread of this process sends.
            protobuf_data(BODY_BYTES // (16 * LENGTH), LENGTH, TOKENS * 1000)
            json_data(BODY_BYTES // (14 * LENGTH), LENGTH, TOKENS * 1000)
            with ThreadPoolExecutor(SENDERS + 2) as pool:
                senders = [pool.submit(send_bodies, client, number) for client in clients[1 : SENDERS + 1]]
                steps = pool.submit(timed, clients[0].step, 3 * number)
                small = pool.submit(small_calls, clients[-1].heart(), senders)
                found = {"body": [second for each in senders for second in each.result()]}
                found |= {"step": steps.result(), "small": small.result()}
        print(json.dumps(found), flush=True)
    is_over.set()


# ---- the service -----------------------------------------------------------------------------------------------------


class LoopWatch:
    """How late the event loop is, and how long its thread computed, in each tick."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self.computed: list[float] = []
        self.most_bytes = 0

    async def watch(self) -> None:
        while True:
            began, computed = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_SECONDS)
            self.late.append(time.perf_counter() - began - TICK_SECONDS)
            self.computed.append(time.thread_time() - computed)
            if len(self.late) % MEMORY_TICKS == 0:
                self.most_bytes = max(self.most_bytes, psutil.Process().memory_info().rss)

    def told(self) -> dict[str, Any]:
        """Milliseconds since the last call."""
        found = {"late_ms": quantiles(self.late), "computed_ms": quantiles(self.computed), "ticks": len(self.late)}
        found |= {"cpu_s": round(sum(self.computed), 2), "most_mib": round(self.most_bytes / 2**20, 1)}
        self.late, self.computed, self.most_bytes = [], [], 0
        return found


def quantiles(seconds: Sequence[float]) -> list[float]:
    """Milliseconds: median, 99th percentile, most."""
    return [round(1e3 * recording.quantile(list(seconds), share), 2) for share in (0.5, 0.99, 1.0)]


def processes(without: int) -> dict[str, psutil.Process]:
    """The processes of the service by name."""
    found = {"front": psutil.Process()}
    for child in psutil.Process().children():
        if child.pid != without:
            words = [word for word in child.cmdline() if word.startswith("echo2_service")] or ["other"]
            found[words[0].rpartition(".")[2]] = child
    return found


def memory(without: int) -> dict[str, float]:
    """MiB of each process."""
    return {name: round(one.memory_info().rss / 2**20, 1) for name, one in processes(without).items()}


def cpu_seconds(without: int) -> dict[str, float]:
    return {name: sum(one.cpu_times()[:2]) for name, one in processes(without).items()}


class Clients:
    """The clients' process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def do(self, name: str, number: int) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, number]).encode() + b"\n")
        line = await self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the clients ended at {name} {number}")
        return json.loads(line)


@asynccontextmanager
async def service(folder: Path, num_keys: int) -> Any:
    """The front in this loop, and clients of its tenants."""
    database, listener = open_database(folder), listening("127.0.0.1", 0)
    api_keys = ApiKeys(database, time.time)
    keys = [api_keys.add_key(f"tenant-{number}") for number in range(num_keys)]
    (folder / "keys.json").write_text(json.dumps(keys))
    backend = LocalBackend(base_directories({BASE: ""}, folder), folder / "backend", "cpu")
    front = App(database, backend, folder / "checkpoints", time.time)
    server = HttpServer(front.asgi, front.requests.stop)
    serving = asyncio.create_task(server.serve([listener]))
    port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--clients", str(port), str(folder / "keys.json")]
    clients = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=recording.child_environment(),
        limit=1 << 24,
    )
    try:
        yield Clients(clients)
    finally:
        clients.kill()
        await clients.wait()
        server.handle_exit(0, None)
        await serving
        await backend.close()
        database.close()


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    watch, found = LoopWatch(), dict[str, Any](tenants=[], sessions=[])
    async with service(folder, max(*options.tenants, SENDERS + 2) + 1) as clients:
        watching = asyncio.create_task(watch.watch())
        for count in options.tenants:
            found["tenants"].append({"tenants": count, **await beside_idle(clients, count, options.times, watch)})
            print(found["tenants"][-1], flush=True)
        await clients.do("settle", max(*options.tenants, SENDERS + 2))
        found["bodies"] = await large_bodies(clients, options.times // 5, watch)
        print(found["bodies"], flush=True)
        for quarter in range(1, 5):
            seconds = await clients.do("sessions", options.sessions // 4)
            row = {"sessions": quarter * options.sessions // 4, "seconds": round(seconds["seconds"], 1)}
            found["sessions"].append(row | {"mib": memory(clients.process.pid)})
            print(found["sessions"][-1], flush=True)
        watching.cancel()
    return found


async def beside_idle(clients: Clients, count: int, times: int, watch: LoopWatch) -> dict[str, Any]:
    await clients.do("settle", count)
    watch.told()
    before = cpu_seconds(clients.process.pid)
    seconds = await clients.do("active", times)
    used = cpu_seconds(clients.process.pid)
    row: dict[str, Any] = {f"{name}_ms": quantiles(seconds[name]) for name in ("step", "sample")}
    row["cpu_ms"] = {name: round(1e3 * (used[name] - before[name]) / times, 1) for name in before}
    return {**row, "mib": memory(clients.process.pid), "loop": watch.told()}


async def large_bodies(clients: Clients, times: int, watch: LoopWatch) -> dict[str, Any]:
    watch.told()
    before = cpu_seconds(clients.process.pid)
    seconds = await clients.do("bodies", times)
    used = cpu_seconds(clients.process.pid)
    row: dict[str, Any] = {"senders": SENDERS, "bytes": BODY_BYTES, "bodies": len(seconds["body"])}
    row |= {"loop": watch.told(), "cpu_s": {name: round(used[name] - before.get(name, 0.0), 2) for name in used}}
    row |= {f"{name}_ms": quantiles(seconds[name]) for name in ("body", "step", "small")}
    return {**row, "mib": memory(clients.process.pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 100, 500])
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--times", type=int, default=30, help="timed steps and samples; a fifth as many bodies")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.clients:
        serve_orders(int(options.clients[0]), json.loads(Path(options.clients[1]).read_text()))
        return
    if options.quick:
        options.tenants, options.sessions, options.times = [1, 8], 40, 5
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), options))
    print(recording.save("tenants", figures, options.out))


if __name__ == "__main__":
    main()
