"""Counts the copies of a rollout's tokens, and the writes of a snapshot, in a real run of two on-policy steps.

    python benchmarks/count_house.py --run

Head, learner and worker are processes of `echo2 run` with a random model. In each of them this file also runs, as
`sitecustomize`, and looks at what functions of echo2 hold when they return. A *copy* is memory that Python sees, and
that contains the later three quarters of a rollout's tokens, without the last one, which no model reads: bytes, arrays,
tensors, lists, and messages. The rollout is the longest of a group that is not also written for people. The vocabulary
is larger than what is sampled, so that the tokens' ranks among each other are not taken for tokens. Copies within gRPC
and SQLite are not seen. *Written* are bytes of `pwrite`, which writes all chunks and weights, by file, as multiples of
the snapshot's bytes: of a whole snapshot and the deltas of two steps, of which the worker may end before it applies the
second.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from array import array
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

#: Where processes put the marker and what they found; set in the processes of the run alone.
PLACE = os.environ.get("ECHO2_COUNT_COPIES", "")
SETTINGS = """
[run]
max_steps = 2
[model]
path = "{model}"
[tasks]
source = "digit_sorting"
params = {{split = "train"}}
[reward]
functions = ["{reward}:number"]
[sampling]
group_size = 4
max_tokens = 40
[schedule]
groups_per_step = 6
max_staleness = 0
[workers]
count = 1
"""
#: In the names of the files that are looked at.
OURS = "/src/echo2"
#: A message is a copy where a call sends or receives it; its parts are views of it.
MESSAGES = ("Deliveries", "FedGroups", "StepReport")
#: A function that makes a message which no call sends, unless it returns a part of the one that it was given.
ENCODES = "messages.encode_group"
#: So many groups of each step are written for people, too: `limits.LOGGED_GROUPS`.
LOGGED_GROUPS = 4
DEPTH_MAX = 4


class Finder:
    """The copies that this process has held, each kept, so that no memory is used twice."""

    def __init__(self) -> None:
        self.marker = b""
        self.copies: dict[tuple[int, int], tuple[str, object]] = {}
        self.written: Counter[str] = Counter()
        self.failed = ""
        self._ours: dict[object, bool] = {}

    def look(self, frame: FrameType, event: str, returned: object) -> None:
        """A profile function. The first group that a worker encodes and nobody logs gives the marker."""
        code = frame.f_code
        if event not in ("call", "return") or not self._ours.setdefault(code, OURS in code.co_filename):
            return
        if event == "call":
            if code.co_name == "encode_delivery" and not self.marker and not (Path(PLACE) / "marker").exists():
                group = frame.f_locals["group"]
                tokens = max((one.tokens for one in group.rollouts), key=len)
                if group.group.number < LOGGED_GROUPS:
                    return
                (Path(PLACE) / "new").write_bytes(tokens[len(tokens) // 4 : -1].tobytes())
                (Path(PLACE) / "new").rename(Path(PLACE) / "marker")
            return
        if not self.marker and (Path(PLACE) / "marker").exists():
            self.marker = (Path(PLACE) / "marker").read_bytes()
        if self.marker:
            place = f"{Path(code.co_filename).stem}.{code.co_name}"
            if place == ENCODES and frame.f_locals["delivered"] is not None:
                return
            try:
                for value in [*frame.f_locals.values(), returned]:
                    self._find(value, place, 0)
            except Exception as error:  # it must not change the run; the count is wrong then, and says so
                self.failed = f"{place}: {error!r}"

    def _find(self, value: Any, place: str, depth: int) -> None:
        if depth > DEPTH_MAX or value is self:
            return
        if isinstance(value, bytes | bytearray | memoryview | array):
            self._add(value, memoryview(value).cast("B") if memoryview(value).c_contiguous else b"", place)
        elif type(value).__name__ in ("ndarray", "Tensor") and not getattr(value, "is_meta", False):
            data = value.detach().cpu().numpy() if type(value).__name__ == "Tensor" else value
            if data.dtype.kind == "i" and data.nbytes:
                place_of = data.__array_interface__["data"][0]
                self._add(value, data.astype("int32").tobytes(), place, place_of, data.nbytes)
        elif hasattr(value, "SerializeToString") and (type(value).__name__ in MESSAGES or place == ENCODES):
            if self.marker in value.SerializeToString():
                self.copies.setdefault((id(value), 0), (f"{type(value).__name__} in {place}", value))
        elif isinstance(value, list | tuple):
            if value and all(type(one) is int for one in value):
                self._add(value, array("i", [one & 0x7FFFFFFF for one in value if one < 1 << 31]).tobytes(), place)
            else:
                for one in value[:64]:
                    self._find(one, place, depth + 1)
        elif is_dataclass(value):
            for one in fields(value):
                self._find(getattr(value, one.name, None), place, depth + 1)

    def _add(self, value: object, data: Any, place: str, at: int = 0, num_bytes: int = 0) -> None:
        """Count a value whose tokens are `data`, as 32-bit numbers, unless its memory belongs to another."""
        if self.marker not in bytes(data):
            return
        if isinstance(value, bytes | bytearray | memoryview | array):
            import numpy as np

            at, num_bytes = np.frombuffer(value, np.uint8).ctypes.data, memoryview(value).nbytes
        at = at or id(value)
        if not any(start <= at < start + length for start, length in self.copies):
            self.copies[at, max(1, num_bytes)] = (f"{type(value).__name__} in {place}", value)

    def count_writes(self) -> None:
        """Have `os.pwrite` count by file."""
        write = os.pwrite

        def counting(file: int, data: Any, at: int, /) -> int:
            done = write(file, data, at)
            self.written[os.readlink(f"/proc/self/fd/{file}")] += done
            return done

        os.pwrite = counting

    def report(self) -> None:
        """Write what was found."""
        found = {"copies": [words for words, _ in self.copies.values()], "written": self.written, "failed": self.failed}
        (Path(PLACE) / f"{os.getpid()}.json").write_text(json.dumps({"process": sys.argv[1:2], **found}))


def watch() -> None:
    """Look at this process from now on, in threads to come, too."""
    finder = Finder()
    finder.count_writes()
    atexit.register(finder.report)
    atexit.register(sys.setprofile, None)
    threading.setprofile(finder.look)
    sys.setprofile(finder.look)


def counted() -> dict[str, Any]:
    """Run, and return the copies by process, with where each was seen first, and the writes by file."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "sitecustomize.py").write_text("import count_copies\nif count_copies.PLACE: count_copies.watch()\n")
        build = "from echo2.demo.small_models import *; "
        build += "t = character_tokenizer([*'0123456789=', *map(chr, range(0x4E00, 0x5E00))]); "
        build += f"write_model(small_qwen3(t, 64), t, __import__('pathlib').Path({place + '/model'!r}))"
        subprocess.run([sys.executable, "-c", build], check=True)
        (folder / "reward.py").write_text(
            "def number(completions, **_): return [*map(float, range(len(completions)))]\n"
        )
        (folder / "run.toml").write_text(SETTINGS.format(model=folder / "model", reward=folder / "reward.py"))
        paths = os.pathsep.join([place, str(Path(__file__).parent), *(path for path in sys.path if path)])
        command = [sys.executable, "-m", "echo2", "run", str(folder / "run.toml"), "--out", str(folder / "run")]
        environment = {**os.environ, "ECHO2_COUNT_COPIES": place, "PYTHONPATH": paths}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        snapshot_bytes = (folder / "model" / "model.safetensors").stat().st_size
        copies: dict[str, list[str]] = {}
        written: dict[str, float] = {}
        for path in sorted(folder.glob("*.json")):
            found = json.loads(path.read_text())
            name = (found["process"] or ["other"])[0]
            if found["failed"]:
                raise SystemExit(f"{name}: {found['failed']}")
            copies.setdefault(name, []).extend(found["copies"])
            for file, num_bytes in found["written"].items():
                if num_bytes > snapshot_bytes / 100:
                    where = f"{name}: {Path(file.partition(' (')[0]).parent.name}/{Path(file).name.split(' ')[0]}"
                    written[where] = round(num_bytes / snapshot_bytes, 2)
        return {"num_copies": sum(map(len, copies.values())), "copies": copies, "written": written}
