"""Hostile inputs over every parser, message of the wire and file format: nothing but typed errors, no hang, no growth.

    make bench-fuzz ARGS='[--inputs 5000000] [--target NAME ...] [--seed 0] [--out FILE]'

The targets are in fuzz_*.py: a reader, valid inputs for it, and the errors that it may raise. Each runs in a process of
its own, so that one that dies is a finding too. Inputs come from valid ones by changes (fuzz_inputs.py); those that
reach a line of ours, or an error message, that none before did are changed further. One that raises anything else,
takes over HANG_SECONDS, or kills the process is cut down to its least and stored below tests/corpus/, which
tests/unit/test_corpus.py reads again.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import mmap
import os
import random
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fuzz_files
import fuzz_methods
import fuzz_service
import fuzz_wire
from fuzz_inputs import INPUT_BYTES_MAX, MESSAGE_BYTES_MAX, changed, changed_message
from fuzz_target import Target
from recording import save

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "corpus"
HANG_SECONDS = 2.0  # of this process's work: what others do on the machine does not count
#: Not interrupted by a signal in all this time: something below Python hangs, and the process is killed.
DEAD_SECONDS = 30.0
#: What a target's process may have of addresses: a claim of gigabytes fails here, and is a finding.
ADDRESS_BYTES = 12 << 30
#: Inputs kept to be changed further, and the share of inputs of which the lines they reach are looked at.
KEPT_MAX = 512
TRACED_SHARE = 0.05
#: Findings of one target that are stored; more of them have a cause in common.
FINDINGS_MAX = 12
SHRINK_SECONDS = 2.0
PACKAGE = f"{os.sep}echo2{os.sep}"
_CHANGING = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|[-+.\w]*\d[-+.\w]*|\(.*\)")


class Hang(BaseException):
    """An input took too long. Not an Exception: no reader catches it."""


def all_targets() -> dict[str, Target]:
    """Every target, by name."""
    rooms = (fuzz_wire, fuzz_methods, fuzz_files, fuzz_service)
    return {target.name: target for room in rooms for target in room.targets()}


def outcome_of(target: Target, data: bytes) -> tuple[str, str]:
    """(kind, detail) of one input: "read", a typed error with its word, or "!" and what should not have been."""
    try:
        target.read(data)
    except target.errors as error:
        return f"{type(error).__name__} {getattr(error, 'reason', '')}".strip(), str(error)
    except Hang:
        return "!Hang", ""
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return f"!{type(error).__name__}", f"{place} {str(error)[:300]}"
    return "read", ""


class Lines:
    """The lines of ours that inputs reached so far."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int]] = set()

    def reaches_new(self, run: Callable[[], object]) -> bool:
        before = len(self.seen)
        sys.settrace(self._enter)
        try:
            run()
        finally:
            sys.settrace(None)
        return len(self.seen) > before

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._step if PACKAGE in frame.f_code.co_filename else None

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.seen.add((frame.f_code, frame.f_lineno))
        return self._step


class Fuzzer:
    """One target under so many inputs. `shared`: the input under way, which outlives this process."""

    def __init__(self, target: Target, seed: int, shared: mmap.mmap) -> None:
        self.target, self.shared = target, shared
        self.rng = random.Random(f"{seed}/{target.name}")
        self.kept = list(target.seeds)
        self.longest = max(INPUT_BYTES_MAX, *map(len, self.kept))
        self.lines = Lines()
        self.messages: set[tuple[str, str]] = set()
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[tuple[str, str], bytes] = {}
        self.slowest = (0.0, 0)

    def run(self, inputs: int) -> dict[str, Any]:
        outcome_of(self.target, self.target.seeds[0])  # without a limit: it may import much
        signal.signal(signal.SIGPROF, _hang)
        for data in self.target.seeds:
            self.take(data)
        growth_from = inputs // 5  # before that, caches fill
        began, resident = time.perf_counter(), _resident_bytes()
        for number in range(inputs):
            if number == growth_from:
                resident = _resident_bytes()
            self.take(self.next_input())
        seconds = time.perf_counter() - began
        grown = _resident_bytes() - resident
        return {
            "inputs": inputs,
            "inputs_per_second": round(inputs / seconds),
            "seconds": round(seconds, 1),
            "outcomes": dict(self.outcomes.most_common()),
            "distinct_messages": len(self.messages),
            "lines_reached": len(self.lines.seen),
            "slowest_ms": round(self.slowest[0] * 1e3, 1),
            "slowest_bytes": self.slowest[1],
            "grown_mib": round(grown / 2**20, 1),
            "findings": [[*key, data.hex()] for key, data in self.findings.items()],
        }

    def next_input(self) -> bytes:
        data, target = self.rng.choice(self.kept), self.target
        if target.kind is not None and self.rng.random() < 0.6:
            return changed_message(target.kind, data, self.kept, self.rng)
        return changed(data, self.kept, target.words, self.rng)

    def take(self, data: bytes) -> None:
        """One input: told apart by what came of it."""
        kind, detail = self._timed(data)
        self.outcomes[kind] += 1
        if kind.startswith("!"):
            self._note(kind, detail, data)
            return
        message = (kind, _CHANGING.sub("_", detail[:400])[:120])
        is_new = message not in self.messages and len(self.messages) < 10 * KEPT_MAX
        self.messages.add(message) if is_new else None
        if is_new or self.rng.random() < TRACED_SHARE:
            if len(data) > self.longest:
                return  # it would only make all that comes of it slow
            if self.lines.reaches_new(lambda: self._timed(data)) or is_new:
                self._keep(data)

    def _keep(self, data: bytes) -> None:
        if len(self.kept) < KEPT_MAX:
            self.kept.append(data)
        else:
            self.kept[self.rng.randrange(len(self.target.seeds), KEPT_MAX)] = data

    def _timed(self, data: bytes) -> tuple[str, str]:
        self.shared[:8] = len(data).to_bytes(8, "little")
        self.shared[8 : 8 + len(data)] = data
        self.target.prepare()
        began = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
            outcome = outcome_of(self.target, data)
        except Hang:  # as it was about to return
            outcome = ("!Hang", "")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = time.process_time() - began
        if seconds > self.slowest[0] and sys.gettrace() is None:
            self.slowest = (seconds, len(data))
        return outcome

    def _note(self, kind: str, detail: str, data: bytes) -> None:
        key = (kind, detail.split(" ")[0])
        known = self.findings.get(key)
        if known is None and len(self.findings) < FINDINGS_MAX:
            self.findings[key] = data if kind == "!Hang" else self._shrunk(key, data)

    def _shrunk(self, key: tuple[str, str], data: bytes) -> bytes:
        """The input without what the finding does not need."""
        until, piece = time.perf_counter() + SHRINK_SECONDS, max(1, len(data) // 2)
        while piece and time.perf_counter() < until:
            at = 0
            while at < len(data) and time.perf_counter() < until:
                shorter = data[:at] + data[at + piece :]
                kind, detail = self._timed(shorter)
                if (kind, detail.split(" ")[0]) == key:
                    data = shorter
                else:
                    at += piece
            piece //= 2
        return data


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ---- a process for each target ---------------------------------------------------------------------------------------


def fuzz(target: Target, inputs: int, seed: int) -> dict[str, Any]:
    """The figures of one target, from a process of its own; where that died, what it died of."""
    shared = mmap.mmap(-1, 8 + MESSAGE_BYTES_MAX)
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(from_child)
        _in_child(target, inputs, seed, shared, to_parent)
    os.close(to_parent)
    with os.fdopen(from_child, "rb") as pipe:
        told = _read_while_it_moves(pipe.fileno(), child, shared)
    _, status = os.waitpid(child, 0)
    if told and os.waitstatus_to_exitcode(status) == 0:
        figures: dict[str, Any] = json.loads(told)
        return figures
    last = shared[8 : 8 + int.from_bytes(shared[:8], "little")]
    return {"inputs": 0, "findings": [["!Died", f"status {os.waitstatus_to_exitcode(status)}", last.hex()]]}


def _in_child(target: Target, inputs: int, seed: int, shared: mmap.mmap, to_parent: int) -> None:
    try:
        gc.freeze()  # what the parent holds is not looked at again
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        told = json.dumps(Fuzzer(target, seed, shared).run(inputs)).encode()
        fuzz_methods.close()
        with os.fdopen(to_parent, "wb") as pipe:
            pipe.write(told)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _read_while_it_moves(pipe: int, child: int, shared: mmap.mmap) -> bytes:
    """What the child tells at its end. It is killed when it works on one input for DEAD_SECONDS."""
    told, before, since = b"", b"", time.monotonic()
    while True:
        ready, _, _ = select.select([pipe], [], [], 1.0)
        if ready:
            part = os.read(pipe, 1 << 20)
            if not part:
                return told
            told += part
        now = hashlib.blake2b(shared[: 1 << 12]).digest()
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() > since + DEAD_SECONDS:
            os.kill(child, signal.SIGKILL)
            since = time.monotonic()


def store(target: str, finding: Sequence[str]) -> Path:
    """The input of a finding as a file below the corpus, named after its content."""
    data = bytes.fromhex(finding[2])
    path = CORPUS / target / hashlib.blake2b(data, digest_size=5).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def report(name: str, figures: dict[str, Any], seed: int) -> None:
    """One target's line, and what was found."""
    if figures["inputs"]:
        outcomes = ", ".join(f"{kind} {count}" for kind, count in figures["outcomes"].items())
        print(
            f"{name}: {figures['inputs']} inputs, {figures['inputs_per_second']}/s, slowest {figures['slowest_ms']} ms "
            f"({figures['slowest_bytes']} bytes), grown {figures['grown_mib']} MiB, {figures['lines_reached']} lines, "
            f"{figures['distinct_messages']} messages; {outcomes}",
            flush=True,
        )
    for finding in figures["findings"]:
        print(f"  FOUND {name}: {finding[0][1:]} {finding[1]}; seed {seed}; {store(name, finding)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=5_000_000, help="of all targets together")
    parser.add_argument("--target", action="append", default=[], help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    targets = all_targets()
    chosen = [targets[name] for name in arguments.target or targets]
    shares = sum(target.share for target in chosen)
    figures: dict[str, Any] = {}
    for target in chosen:
        figures[target.name] = fuzz(target, round(arguments.inputs * target.share / shares), arguments.seed)
        report(target.name, figures[target.name], arguments.seed)
    found = sum(len(each["findings"]) for each in figures.values())
    total, seconds = (
        sum(each["inputs"] for each in figures.values()),
        sum(each.get("seconds", 0.0) for each in figures.values()),
    )
    print(f"{total} inputs over {len(figures)} targets in {seconds:.0f} s, {found} findings, seed {arguments.seed}")
    summary = {
        "inputs": total,
        "seconds": round(seconds),
        "findings": found,
        "seed": arguments.seed,
        "targets": figures,
    }
    print(f"figures are in {save('fuzz', summary, arguments.out)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
