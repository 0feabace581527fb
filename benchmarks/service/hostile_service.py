"""Hostile requests to a real `echo2 serve`, beside a client of the real SDK whose losses must not change by a bit.

    make test-foreign                                     # once: the SDK's environment
    make bench-hostile_service ARGS='[--requests 10000] [--connections 4000] [--out FILE]'

Broken protobuf and JSON, huge shapes, NaN, ids of another tenant, path tricks, wrong keys and methods, bodies that
unpack to gigabytes, from 32 connections at once; meanwhile heads and bodies that come a byte a second, and thousands of
silent connections. Then what one tenant can do with its key: two uploads of 256 MiB that begin and do not end, sessions
with 4 MB of metadata and their listing, and a quota of 20 MB that must bound what lies on the disk; `--tenant-only`
makes these alone, without the SDK. Told: answers by status, the most memory of the process, and whether the client's
lines are those of an undisturbed run. Linux only: memory is read below /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import recording
import zstandard

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from echo2.core.disk import allocated_bytes  # noqa: E402
from echo2_service import tinker_pb2 as pb  # noqa: E402
from echo2_service.commands.serve import open_database  # noqa: E402
from echo2_service.front.request_guard import ApiKeys  # noqa: E402
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


class Tenant:
    """What one tenant can do with its key. Each attack returns figures; `others` is the slowest call of another tenant
    meanwhile, in seconds.
    """

    def __init__(self, served: Served, tenant: str) -> None:
        database = open_database(served.folder)
        api_keys = ApiKeys(database, time.time)
        self.served, self.tenant = served, tenant
        self.key, self.other = api_keys.add_key(tenant), api_keys.add_key("bystander")
        database.close()

    def ask(self, path: str, body: object, key: str = "") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url, headers = f"{self.served.url}/api/v1/{path}", {"x-api-key": key or self.key}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text[:1] == b"{" else text
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def done(self, path: str, body: object) -> Any:
        """The result of a request, or its refusal."""
        status, future = self.ask(path, body)
        while status == 200 and "request_id" in future:
            status, future = self.ask("retrieve_future", {"request_id": future["request_id"]})
            if status == 408:
                status, future = (
                    200,
                    {"request_id": future["request_id"]} if isinstance(future, dict) else json.loads(future),
                )
        return future

    async def others(self, seconds: float) -> dict[str, float]:
        """Calls of another tenant, one after the other, for so long."""
        slowest, refused, until = 0.0, 0, time.monotonic() + seconds
        while time.monotonic() < until:
            begun = time.monotonic()
            status, _ = await asyncio.to_thread(self.ask, "create_session", {}, self.other)
            slowest, refused = max(slowest, time.monotonic() - begun), refused + (status != 200)
            await asyncio.sleep(0.1)
        return {"slowest_seconds": round(slowest, 3), "refused": refused}

    async def stalled_uploads(self) -> dict[str, Any]:
        port = int(self.served.url.rpartition(":")[2])
        head = f"POST /api/v1/adapters?base_model=echo2/tiny&name=a HTTP/1.1\r\nHost: x\r\nX-API-Key: {self.key}\r\n"

        async def upload() -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}Content-Length: {256 << 20}\r\n\r\n".encode())
            with suppress(ConnectionError):
                for _ in range(255):
                    writer.write(bytes(1 << 20))
                    await asyncio.wait_for(writer.drain(), 30)
            answer = await reader.read(64)
            writer.close()
            return answer[9:12].decode() or "closed"

        uploads = asyncio.gather(upload(), upload(), return_exceptions=True)
        found: dict[str, Any] = {"others": await self.others(15.0)}
        return {**found, "answers": [str(each) for each in await uploads]}

    async def metadata(self) -> dict[str, Any]:
        large = {"user_metadata": {"a": "x" * 4_000_000}}
        statuses = Counter(str(self.ask("create_session", large)[0]) for _ in range(20))
        most = {"user_metadata": {"a": "x" * 4000}}
        statuses.update(f"{self.ask('create_session', most)[0]} of 4 kB" for _ in range(1000))
        begun = time.monotonic()
        answer = await asyncio.to_thread(told, self.served, "sessions?limit=1000", self.key)
        seconds = round(time.monotonic() - begun, 3)
        return {"answers": dict(statuses), "listed": len(answer["sessions"]), "listing_seconds": seconds}

    async def hoard(self) -> dict[str, Any]:
        """All that is kept: models with moments and journals, saves, samplers, sessions, answers."""
        session = self.ask("create_session", {})[1]["session_id"]
        folder, models = self.served.folder, []
        before, refusals = allocated_bytes(folder), Counter[str]()
        targets = {"data": [1] * 100, "dtype": "int64", "shape": [100]}
        datum = {"model_input": {"chunks": [{"tokens": [1] * 100}]}, "loss_fn_inputs": {"target_tokens": targets}}
        train = {"forward_backward_input": {"data": [datum] * 50, "loss_fn": "cross_entropy"}}
        for turn in range(40):
            body = {
                "session_id": session,
                "model_seq_id": turn,
                "base_model": "echo2/tiny",
                "lora_config": {"rank": 64},
            }
            made = self.done("create_model", body)
            models += [made["model_id"]] if isinstance(made, dict) and "model_id" in made else []
            model = models[turn % len(models)]
            named: dict[str, Any] = {"path": f"n{turn}"}
            verbs: list[tuple[str, dict[str, Any]]] = [
                ("forward_backward", train),
                ("optim_step", {"adam_params": {}}),
                ("save_weights", named),
            ]
            verbs += [("save_weights_for_sampler", {}), ("save_weights_for_sampler", named)]
            for verb, more in verbs:
                outcome = await asyncio.to_thread(self.done, verb, {"model_id": model, **more})
                refusals[verb] += "error" in outcome if isinstance(outcome, dict) else 1
        grown = allocated_bytes(folder) - before
        return {"quota_mb": 20, "grown_mb": round(grown / 1e6, 2), "models": len(models), "refusals": dict(refusals)}

    async def attack(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in (self.stalled_uploads, self.metadata, self.hoard):
            found[one.__name__] = await one()
        return found


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


def told(served: Served, path: str, key: str = "") -> Any:
    """What the service tells the client that is not hostile, or who has this key."""
    request = urllib.request.Request(f"{served.url}/api/v1/{path}", headers={"x-api-key": key or served.key})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def most_memory(process: int) -> int:
    """MiB, the most that it had."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024


def tenant_attacks() -> dict[str, Any]:
    """On a service of its own, without machines; the attacker has a quota of 20 MB of disk."""
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), bills="quota_disk_gb = { mallory = 0.02 }", with_machine=False)
        before = most_memory(served.process.pid)
        found = asyncio.run(Tenant(served, "mallory").attack())
        found |= {"mib_before": before, "mib_at_most": most_memory(served.process.pid)}
        served.process.terminate()
        served.process.communicate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=4_000)
    parser.add_argument("--seconds", type=float, default=150.0, help="how long slow and silent ones go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tenant-only", action="store_true")
    options = parser.parse_args()
    if options.tenant_only:
        print(json.dumps(tenant_attacks(), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder))
        database = open_database(served.folder)
        key = ApiKeys(database, time.time).add_key("mallory")
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
    found["tenant"] = tenant_attacks()
    print(json.dumps(found, indent=1))
    print(recording.save("hostile_service", found, options.out))


if __name__ == "__main__":
    main()
