"""What a target of the fuzzer is: a reader of outside bytes, valid inputs for it, and the errors that it may raise."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from google.protobuf.message import Message

from echo2.core.errors import PeerError, UserError

#: Files are written where that costs no disk.
IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Target:
    """`read` takes hostile bytes and raises nothing but `errors`. `seeds`: valid inputs. `kind`: of which message of
    the wire they are bytes, so that its fields can be changed. `words`: of the text's grammar. `share`: of the inputs
    of a run, beside the others' 1: less for what is slow. `prepare` is called before each input, and is no part of what
    it costs.
    """

    name: str
    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    kind: type[Message] | None = None
    words: tuple[bytes, ...] = ()
    share: float = 1.0
    errors: tuple[type[Exception], ...] = (UserError, PeerError)
    prepare: Callable[[], object] = lambda: None


@cache
def folder() -> Path:
    """A directory of this process, gone when it ends."""
    made = Path(tempfile.mkdtemp(prefix="fuzz-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of a file's path as one of bytes: they are written to a file of this name first."""

    def read_bytes(data: bytes) -> object:
        path = folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return read_bytes


def text(data: bytes) -> str:
    """Bytes as the text of a flag or of a field of the wire: any character, also one that UTF-8 has not."""
    return data.decode("utf-8", "surrogateescape")
