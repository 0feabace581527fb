"""What a head does a second: groups from lease to ledger to learner, over real links, by its own CPU time.

    make bench-head_load ARGS='--workers 10 100 --seconds 30'

A real `echo2 head`, a learner that trains nothing, and fake workers that answer each batch of leases at once with
rollouts made beforehand; all gRPC with mutual TLS on loopback, the workers in processes of their own, the reward
(`exact_match`) in its usual one. Counted from the first trained step on: groups that a step was trained on, and events
of the head's log, per second of the head process's own CPU time, so that other load on the machine does not count; and
of the workers, how long an acknowledgement took.

    make bench-head_load ARGS='--workers 10 --rounds 5 --stores none store store?lag_seconds=30 s3://bucket/run'

compares stores, one after the other in each round. Where `s3://` is among them and AWS_ENDPOINT_URL is not set, moto's
server is the object store (`pip install s3fs 'moto[server]'`), in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import recording
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo2.config.rundir import RunDir
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import RUN_POLICY, RolloutGroup, TensorBytes
from echo2.learner.core.publication import BorrowedWeights, Publisher
from echo2.learner.link.head_client import LearnerInfo, join_head
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink, connect
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket

END, VOCAB = 1, 31
HEARTBEAT_SECONDS = 2.0
CHECKPOINT_STEPS = 8
PUBLISH_STEPS = 4
WORKERS_PER_PROCESS = 500
#: The head takes 16 handshakes a second of one address.
CONNECTS_PER_SECOND = 15.0
#: The head checks it, nobody computes it.
MODEL = (
    b'{"model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 31, '
    b'"intermediate_size": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}'
)
#: Flags that the record names.
CHOICES = ("seconds", "samples", "tokens", "batch", "sampling_seconds", "step", "rounds")
#: For an object store's stand-in to serve.
SERVER_SECONDS = 120.0
CONFIG = """
[model]
path = "{model}"
[run]
max_steps = 1000000
[tasks]
source = "digit_sorting"
[reward]
functions = ["exact_match"]
[sampling]
group_size = {samples}
max_tokens = {tokens}
groups_per_batch = {batch}
[schedule]
groups_per_step = {step}
max_staleness = 8
publish_every = {publish}
[head]
listen = "127.0.0.1:{port}"
store = "{store}"
[workers]
count = 0
"""


def tokenizer_files() -> dict[str, bytes]:
    """One token a character."""
    vocab = {"<pad>": 0, "<eos>": END} | {c: 2 + i for i, c in enumerate("0123456789abcdefghijklmnop=+?")}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}'
    return {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings}


# ---- the workers' side -----------------------------------------------------------------------------------------------


def rollouts(samples: int, tokens: int, version: int) -> list[wire.Rollout]:
    """The same for every lease: the head does not know."""
    ids = array("i", [2 + place % 10 for place in range(tokens - 1)] + [END])
    sample = wire.Rollout(
        tokens=ids.tobytes(),
        logprobs=array("f", [-0.5] * tokens).tobytes(),
        loss_mask=b"\x01" * tokens,
        version_spans=[wire.VersionSpan(start=0, version=version)],
        finish="stop",
    )
    return [sample] * samples


async def worker(index: int, options: argparse.Namespace) -> None:
    known = PeerIdentity(options.directory / f"w{index}").load()
    assert known is not None
    await asyncio.sleep(index / CONNECTS_PER_SECOND)
    while True:
        link, installed = GrpcLink(options.address, known[1]), wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=0)
        beating = asyncio.ensure_future(beat(link, installed))
        try:
            await attend(link, installed, options)
        except (LinkError, PeerError) as error:  # it comes back, as a real worker does
            print(f"worker {index}: {error}", file=sys.stderr)
        beating.cancel()
        await link.close()
        await asyncio.sleep(1.0)


async def beat(link: GrpcLink, installed: wire.SnapshotId) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        with suppress(LinkError, PeerError):
            await link.call("Report", wire.WorkerReport(installed=installed), 60.0)


async def attend(link: GrpcLink, installed: wire.SnapshotId, options: argparse.Namespace) -> None:
    hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=options.batch * options.samples, installed=installed)
    samples = rollouts(options.samples, options.tokens, 0)
    notes = options.directory / f"acknowledged-{options.range[0]}"
    async for order in link.stream("Attend", hello):
        if order.HasField("snapshot"):
            installed.version = order.snapshot.version
            samples = rollouts(options.samples, options.tokens, installed.version)
            await link.call("Report", wire.WorkerReport(installed=installed), 60.0)
        items = [
            wire.Delivery(
                lease_id=lease.lease_id,
                group={
                    "policy": lease.policy,
                    "kind": lease.kind,
                    "number": lease.number,
                    "lineage": 1,
                    "rollouts": samples,
                    "generate_seconds": 0.001,
                },
            )
            for lease in order.leases.leases
        ]
        if items:
            await asyncio.sleep(options.sampling_seconds)
            began = time.time()
            await link.call("Deliver", wire.Deliveries(items=items), 60.0)
            with notes.open("a") as file:
                file.write(f"{began} {time.time() - began}\n")


async def workers(options: argparse.Namespace) -> None:
    await asyncio.gather(*(worker(index, options) for index in range(*options.range)))


# ---- the learner's side ----------------------------------------------------------------------------------------------


async def learner(directory: Path, ready: asyncio.Event, marks: list[tuple[int, float]]) -> None:
    """Takes, reports, saves nothing; notes when which step was recorded."""

    async def connect_head() -> GrpcLink:
        return (await connect(f"@{RunDir(directory / 'run').learner_ticket}", directory / "learner"))[0]

    publisher = Publisher(directory / "learner")
    client = await join_head(await connect_head(), 0, LearnerInfo("cpu", VOCAB), publisher, 300.0, print)
    files = tokenizer_files()
    await client.publish(0, BorrowedWeights({"w": TensorBytes("I16", (4,), bytes(8))}, files))
    ready.set()
    for step in range(1_000_000):
        numbers = [item.group.number async for item in client.take_groups(step) if isinstance(item, RolloutGroup)]
        await client.report_step(step, numbers, {"time/step": 0.1}, {})
        marks.append((len(numbers), time.perf_counter()))
        if (step + 1) % PUBLISH_STEPS == 0:
            weights = (step + 1).to_bytes(8, "little")
            await client.publish(step + 1, BorrowedWeights({"w": TensorBytes("I16", (4,), weights)}, files))
        if step % CHECKPOINT_STEPS == 0:
            oldest = max(0, step + 1 - CHECKPOINT_STEPS)
            await client.report_checkpoint(step + 1, oldest, [oldest, step + 1])


# ---- measuring -------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def mebibytes(pid: int) -> float:
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def num_events(run: Path) -> int:
    return sum(path.read_bytes().count(b'"event"') for path in run.glob("events.jsonl*"))


def store_waits(run: Path) -> list[float]:
    """Mean seconds that a message waited for the store, by step; the first is left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["store/wait_seconds"] for row in rows[1:] if "store/wait_seconds" in row]


def acknowledgement_ms(directory: Path, since: float, until: float) -> list[float]:
    """How long the deliveries took that workers began between these times."""
    texts = [path.read_text() for path in directory.glob("acknowledged-*")]
    notes = [line.split() for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [1000 * float(seconds) for at, seconds in notes if since <= float(at) <= until]


def spread(values: list[float]) -> list[float]:
    """Quartiles and the 99th percentile."""
    return [round(recording.quantile(values, share), 2) for share in (0.25, 0.5, 0.75, 0.99)]


@contextmanager
def object_store(stores: list[str]) -> Iterator[None]:
    """moto's server, if one of the stores is in S3 and none is named."""
    buckets = {store.removeprefix("s3://").partition("/")[0] for store in stores if store.startswith("s3://")}
    if not buckets or "AWS_ENDPOINT_URL" in os.environ:
        yield
        return
    port = free_port()
    os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.time() + SERVER_SECONDS
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if server.poll() is not None or time.time() > until:
                raise SystemExit("moto's server did not start: pip install s3fs 'moto[s3]' flask flask-cors")
            time.sleep(0.2)
        for bucket in buckets:
            importlib.import_module("s3fs").S3FileSystem().mkdir(bucket)
        yield
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def enrol(directory: Path, address: str, count: int) -> None:
    """All workers at once, before the head runs: over the wire it admits four a second."""
    identity = RunIdentity.create_or_load(RunDir(directory / "run").identity)
    ticket = Ticket.parse(identity.make_ticket("worker", address, count, 24.0, is_own=True))
    for index in range(count):
        peer = PeerIdentity(directory / f"w{index}")
        _, certificate = identity.enrol(ticket.ticket_id, "worker", peer.request())
        peer.keep(ticket.credentials.ca_pem, certificate)


class RealHead:
    """`echo2 head` in a directory of its own, with so many workers enrolled."""

    def __init__(
        self,
        directory: Path,
        count: int,
        options: argparse.Namespace,
        store: str = "none",
    ) -> None:
        port = free_port()
        self.directory, self.run, self.address = directory, directory / "run", f"127.0.0.1:{port}"
        (directory / "model").mkdir()
        for name, data in {"config.json": MODEL, "model.safetensors": b"", **tokenizer_files()}.items():
            (directory / "model" / name).write_bytes(data)
        sizes = {"samples": options.samples, "tokens": options.tokens, "batch": options.batch, "step": options.step}
        sizes["publish"] = PUBLISH_STEPS
        config = directory / "run.toml"
        self.store = "" if store == "none" else store if "://" in store else f"{directory}/{store}"
        config.write_text(CONFIG.format(model=directory / "model", port=port, store=self.store, **sizes))
        enrol(directory, self.address, count)
        self._log = open(directory / "head.log", "wb")  # noqa: SIM115 (closed with the head)
        command = [sys.executable, "-m", "echo2", "head", str(config), "--out", str(self.run)]
        if options.profile:
            command[1:1] = ["-m", "cProfile", "-o", options.profile]
        self.process = subprocess.Popen(command, stderr=self._log)
        self.fleet: list[subprocess.Popen[bytes]] = []
        while not (self.run / "status.json").exists():
            if self.process.poll() is not None:
                raise SystemExit((directory / "head.log").read_text()[-2000:])
            time.sleep(0.1)

    def start_workers(self, count: int, options: argparse.Namespace) -> None:
        for first in range(0, count, WORKERS_PER_PROCESS):
            last = min(count, first + WORKERS_PER_PROCESS)
            words = ["--directory", str(self.directory), "--address", self.address, "--range", str(first), str(last)]
            words += ["--samples", str(options.samples), "--tokens", str(options.tokens), "--batch", str(options.batch)]
            words += ["--sampling-seconds", str(options.sampling_seconds)]
            self.fleet.append(subprocess.Popen([sys.executable, __file__, *words]))

    def attending(self) -> int:
        return len(json.loads((self.run / "status.json").read_text())["workers"])

    def close(self) -> None:
        for process in self.fleet:
            process.kill()
        self.process.terminate()
        time.sleep(0.5)  # told twice, it does not wait for the learner to save
        self.process.terminate()
        self.process.wait(60)
        self._log.close()


@asynccontextmanager
async def at_work(
    head: RealHead, count: int, options: argparse.Namespace, marks: list[tuple[int, float]]
) -> AsyncIterator[None]:
    """The learner, which ends with this, and so many workers, from the first trained step on."""
    ready = asyncio.Event()
    learning = asyncio.ensure_future(learner(head.directory, ready, marks))
    try:
        while not ready.is_set():
            if learning.done():
                learning.result()
            await asyncio.sleep(0.05)
        head.start_workers(count, options)
        until = time.perf_counter() + options.join_seconds
        while head.attending() < count and time.perf_counter() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        while not marks and not learning.done():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if learning.done():
            learning.result()
        yield
        if learning.done():
            learning.result()
    finally:
        learning.cancel()


async def measure(head: RealHead, count: int, options: argparse.Namespace) -> dict[str, Any]:
    marks = list[tuple[int, float]]()
    async with at_work(head, count, options, marks):
        attending = head.attending()
        pid, since = head.process.pid, time.time()
        before = cpu_seconds(pid), num_events(head.run), len(marks), time.perf_counter(), mebibytes(pid)
        await asyncio.sleep(options.seconds)
        after = cpu_seconds(pid), num_events(head.run), len(marks), time.perf_counter(), mebibytes(pid)
    waited = acknowledgement_ms(head.directory, since, time.time())
    cpu, events, seconds = after[0] - before[0], after[1] - before[1], after[3] - before[3]
    groups = sum(number for number, _ in marks[before[2] : after[2]])
    return {
        "workers": attending,
        "groups": groups,
        "events": events,
        "groups_per_cpu_second": round(groups / cpu, 1),
        "events_per_cpu_second": round(events / cpu, 1),
        "groups_per_second": round(groups / seconds, 1),
        "head_cpu_share": round(cpu / seconds, 3),
        "ack_ms": spread(waited) if waited else [],
        **({"wait_ms": round(1000 * statistics.mean(waits), 2)} if (waits := store_waits(head.run)) else {}),
        "mebibytes_before": round(before[4], 1),
        "mebibytes_after": round(after[4], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--join-seconds", type=float, default=180.0, help="for all workers to be there")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="groups that a worker is leased together")
    parser.add_argument("--sampling-seconds", type=float, default=0.0, help="that a worker waits before it answers")
    parser.add_argument("--step", type=int, default=128, help="groups a step")
    text = "none, a directory's name or a URL, with or without ?lag_seconds=N; ratios are to the first"
    parser.add_argument("--stores", nargs="+", default=["none"], help=text)
    parser.add_argument("--rounds", type=int, default=1, help="so often, each store in turn")
    parser.add_argument("--out", type=Path, help="file for the figures (default: in results/)")
    parser.add_argument("--profile", default="", help="write the head's cProfile there; its times are not real ones")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--range", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.range:
        asyncio.run(workers(options))
        return
    rows = list[dict[str, Any]]()
    with object_store(options.stores):
        for count, number in ((count, number) for count in options.workers for number in range(options.rounds)):
            first = 0.0
            for store in options.stores:
                place, mark, lag = store.partition("?")  # of each measurement a place of its own
                place += f"-{len(rows)}" if "://" in store else ""
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    head = RealHead(Path(folder), count, options, store=f"{place}{mark}{lag}")
                    try:
                        found = asyncio.run(measure(head, count, options))
                    finally:
                        head.close()
                first = first or found["groups_per_cpu_second"]
                ratio = round(found["groups_per_cpu_second"] / first, 3)
                rows.append({"store": store, "round": number, **found, "ratio": ratio, "load": os.getloadavg()[0]})
                print(json.dumps(rows[-1]), flush=True)
    chosen = {name: value for name, value in vars(options).items() if name in CHOICES}
    print(recording.save("head_load", {"options": chosen, "rows": rows}, options.out))


if __name__ == "__main__":
    main()
