"""Hostile requests to a real `echo2 serve`, beside a client of the real SDK whose losses must not change by a bit.

    make test-sdk                                        # once: the SDK's environment
    python benchmarks/hostile_service.py [--requests 10000] [--connections 4000] [--out FILE]

Broken protobuf and JSON, huge shapes, NaN, ids of another tenant, path tricks, wrong keys and methods, bodies that
unpack to gigabytes, from 32 connections at once; meanwhile heads and bodies that come a byte a second, and thousands of
silent connections. Told: answers by status, the most memory of the process, and whether the client's lines are those of
an undisturbed run. Linux only: memory is read below /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import recording
import zstandard

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from echo2.service import tinker_pb2 as pb  # noqa: E402
from echo2.service.access import Doorkeeper  # noqa: E402
from echo2.service.serve import open_database  # noqa: E402
from served import Served  # noqa: E402 (a service and a machine, as the tests start them)

NUM_STEPS = 40
PROTOBUF = {"content-type": "application/x-protobuf"}
#: (method, path, headers, body).
Attack = tuple[str, str, dict[str, str], bytes]


def packed_zeros(num_bytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    block = bytes(1 << 20)
    parts = [compressor.compress(block) for _ in range(num_bytes >> 20)]
    return b"".join([*parts, compressor.flush()])


def message(rng: random.Random, model: str) -> bytes:
    """A forward_backward whose tensors are not what they say."""
    made = pb.ForwardBackwardRequest(model_id=model, seq_id=rng.choice([1, 2**31 - 1]), loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = rng.randbytes(rng.choice([0, 3, 16]))
    shape = [rng.choice([-1, 0, 4, 2**31, 2**62]) for _ in range(rng.randrange(4))]
    dtype: Any = rng.randrange(7)  # of which the last two are none
    tensor = pb.Tensor(dtype=dtype, shape=shape)
    if rng.random() < 0.5:
        tensor.dense = np.full(4, np.nan, "<f4").tobytes()
    else:
        sparse = pb.SparseCsr(values=rng.randbytes(16), crow_indices=rng.randbytes(24), col_indices=rng.randbytes(16))
        tensor.sparse_csr.CopyFrom(sparse)
    datum.loss_fn_inputs[rng.choice(["target_tokens", "weights", "nothing"])].CopyFrom(tensor)
    return made.SerializeToString()


class Attacker:
    """Makes requests. `foreign`: ids and paths of another tenant."""

    def __init__(self, key: str, foreign: list[str], seed: int) -> None:
        self.key, self.foreign, self.rng = {"x-api-key": key}, foreign, random.Random(seed)
        self.bomb = packed_zeros(4 << 30)
        self.kinds: list[Callable[[], Attack]] = [
            self.garbage, self.broken_json, self.not_so_shaped, self.of_another, self.path_trick, self.wrong_key,
            self.wrong_method, self.bombs, self.announced,
        ]  # fmt: skip

    def draw(self) -> Attack:
        return self.rng.choice(self.kinds)()

    def path(self) -> str:
        names = ("forward_backward", "optim_step", "asample", "save_weights", "load_weights", "create_model")
        return "/api/v1/" + self.rng.choice((*names, "retrieve_future", "create_sampling_session", "copy_weights"))

    def garbage(self) -> Attack:
        return "POST", self.path(), {**self.key, **PROTOBUF}, self.rng.randbytes(self.rng.randrange(2000))

    def broken_json(self) -> Attack:
        body = self.rng.choice(
            [b"[" * 100_000, b'{"a":' * 50_000, b'{"model_id": 1e999}', b'{"seq_id": NaN}', b"\xff\xfe"]
        )
        return "POST", self.path(), self.key, body

    def not_so_shaped(self) -> Attack:
        model = self.rng.choice(self.foreign)
        return "POST", "/api/v1/forward_backward", {**self.key, **PROTOBUF}, message(self.rng, model)

    def of_another(self) -> Attack:
        known = self.rng.choice(self.foreign)
        body = {"model_id": known, "session_id": known, "sampling_session_id": known, "request_id": known, "seq_id": 1}
        body |= {"path": known, "source_path": known, "model_path": known, "adam_params": {}, "model_seq_id": 0}
        body |= {"sampling_session_seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, "base_model": "echo2/tiny"}
        return "POST", self.path(), self.key, json.dumps(body).encode()

    def path_trick(self) -> Attack:
        part = self.rng.choice(["..%2f..%2f..%2fetc%2fpasswd", "%00", "weights/../../service.sqlite", "x" * 5000])
        return (
            self.rng.choice(["GET", "DELETE", "PUT"]),
            f"/api/v1/training_runs/{part}/checkpoints/{part}",
            self.key,
            b"",
        )

    def wrong_key(self) -> Attack:
        return "POST", self.path(), {"x-api-key": "tml-" + self.rng.randbytes(16).hex()}, b"{}"

    def wrong_method(self) -> Attack:
        return self.rng.choice(["PATCH", "PUT", "DELETE"]), self.path(), self.key, b"{}"

    def bombs(self) -> Attack:
        headers = {**self.key, **PROTOBUF, "content-encoding": "zstd"}
        return (
            "POST",
            "/api/v1/forward_backward",
            headers,
            self.rng.choice([self.bomb, self.bomb[:-9], b"\x28\xb5\x2f\xfd"]),
        )

    def announced(self) -> Attack:
        return "POST", self.path(), {**self.key, "content-length": str(2**40)}, b""


async def requests(port: int, attacker: Attacker, count: int) -> Counter[str]:
    """From 32 connections at once, one for each request; answers by status."""
    found, left = Counter[str](), iter(range(count))

    async def sender() -> None:
        for _ in left:
            method, path, headers, body = attacker.draw()
            given = {"host": "x", "content-length": str(len(body)), **headers, "connection": "close"}
            head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {given[name]}\r\n" for name in given)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            status, answer = "closed", b""
            with suppress(ConnectionError):
                writer.write(head.encode() + b"\r\n" + body)
                answer = await reader.read()
                status = answer[9:12].decode() or "closed"
            writer.close()
            found[status] += 1
            if not status.startswith("4"):
                print(method, path, headers, body[:80], answer[-200:], flush=True)

    await asyncio.gather(*(sender() for _ in range(32)))
    return found


async def drip(port: int, text: bytes, seconds: float) -> str:
    """A byte a second; how it ended."""
    until = time.monotonic() + seconds
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        for at in range(len(text)):
            if time.monotonic() > until:
                writer.close()
                return "still open"
            writer.write(text[at : at + 1])
            await writer.drain()
            with suppress(TimeoutError):
                answer = await asyncio.wait_for(reader.read(64), 1.0)
                writer.close()
                return answer[9:12].decode() or "closed"
    return "closed"


async def silent(port: int, seconds: float) -> str:
    """A connection that says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await asyncio.wait_for(reader.read(1), seconds)
    except TimeoutError:
        return "still open"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()
    return "closed"


async def all_of_them(served: Served, key: str, foreign: list[str], options: argparse.Namespace) -> dict[str, Any]:
    port = int(served.url.rpartition(":")[2])
    begun = f"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n".encode()
    head, body = begun + b"X-Long: " + b"a" * 500, begun + b"Content-Length: 500\r\n\r\n"
    kinds: dict[str, list[Coroutine[Any, Any, str]]] = {
        "slow_heads": [drip(port, head, options.seconds) for _ in range(300)],
        "slow_bodies": [slow_body(port, body, options.seconds) for _ in range(100)],
        "silent": [silent(port, options.seconds) for _ in range(options.connections)],
    }
    beside = {name: asyncio.gather(*each) for name, each in kinds.items()}
    found = {"answers": dict(await requests(port, Attacker(key, foreign, options.seed), options.requests))}
    return {**found, **{name: dict(Counter(await each)) for name, each in beside.items()}}


async def slow_body(port: int, begun: bytes, seconds: float) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    for _ in range(int(seconds)):
        with suppress(ConnectionError):
            writer.write(b" ")
        with suppress(TimeoutError):
            answer = await asyncio.wait_for(reader.read(64), 1.0)
            writer.close()
            return answer[9:12].decode() or "closed"
    writer.close()
    return "still open"


def told(served: Served, path: str) -> Any:
    """What the service tells the client that is not hostile."""
    request = urllib.request.Request(f"{served.url}/api/v1/{path}", headers={"x-api-key": served.key})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def most_memory(process: int) -> int:
    """MiB, the most that it had."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=4_000)
    parser.add_argument("--seconds", type=float, default=150.0, help="how long slow and silent ones go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder))
        database = open_database(served.folder)
        key = Doorkeeper(database, time.time).add_key("mallory")
        database.close()
        undisturbed, _ = served.client("tinker-038", "training.py", str(NUM_STEPS)).communicate()
        foreign = [one["tinker_path"] for one in told(served, "checkpoints")["checkpoints"][:4]]
        foreign += [*told(served, "sessions")["sessions"], foreign[0].removeprefix("tinker://").split("/")[0]]
        before = most_memory(served.process.pid)
        client = served.client("tinker-038", "training.py", str(NUM_STEPS))
        found = asyncio.run(all_of_them(served, key, foreign, options))
        beside, _ = client.communicate()
        found |= {"mib_before": before, "mib_at_most": most_memory(served.process.pid)}
        found["client_undisturbed"] = beside == undisturbed and client.returncode == 0
        for process in (served.machine, served.process):
            process.terminate()
            process.communicate()
    print(json.dumps(found, indent=1))
    print(recording.save("hostile_service", found, options.out))


if __name__ == "__main__":
    main()
