"""A place for objects, named by URL, that outlives this machine: a directory, or whatever fsspec reaches (s3://, gs://,
...). Objects are whole or absent, and a key can be created once: of two who create it, one is told that it exists.

Every method raises LinkError when the place cannot be reached; then the object may be there or not.
"""

from __future__ import annotations

import importlib
import itertools
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from echo2.core.errors import LinkError, UserError

T = TypeVar("T")

#: Bytes read or written at once of a large object.
PIECE_BYTES = 8 << 20


class Objects(Protocol):
    """Objects by key; a key is a relative path with "/"."""

    def get(self, key: str) -> bytes | None:
        """Return an object; None: there is none."""

    def create(self, key: str, data: bytes) -> bool:
        """Make an object durable, unless there is one. Return whether it is new."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below a folder, sorted. A list may be older than what `get` sees."""

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects; those that are gone already do not matter."""

    def upload(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write or replace a large object, piece by piece. Name it elsewhere only when it is whole."""

    def download(self, key: str) -> Iterator[bytes]:
        """Yield a large object piece by piece. Raises FileNotFoundError: there is none."""


def open_objects(url: str) -> Objects:
    """Return the objects at a URL, or in a directory.

    Raises:
        UserError: no installed package reaches this kind of URL.
        LinkError: the directory cannot be made.
    """
    kind, mark, rest = url.partition("://")
    if not mark or kind == "file":
        return Directory(Path(rest if mark else url).expanduser().absolute())
    try:
        return Remote(url, *importlib.import_module("fsspec.core").url_to_fs(url, use_listings_cache=False))
    except (ImportError, ValueError, TypeError) as error:
        raise UserError(
            f"head.store = {url!r} cannot be used: {error}. Install the package for {kind}:// (pip install "
            "'echo2[store]' for s3://), or name a directory."
        ) from error


class Directory:
    """Objects as files of one directory, private to their owner: each is written aside, synced, and linked in place."""

    def __init__(self, path: Path) -> None:
        self._path, self._serial, self._mine = path, itertools.count(), secrets.token_hex(4)
        self._folders = set[Path]()
        for folder in (path, path / "tmp"):
            self._try(lambda folder=folder: folder.mkdir(mode=0o700, parents=True, exist_ok=True))  # type: ignore[misc]

    def get(self, key: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                return (self._path / key).read_bytes()
            except FileNotFoundError:
                return None

        return self._try(read)

    def create(self, key: str, data: bytes) -> bool:
        def place(aside: Path, path: Path) -> bool:
            try:
                os.link(aside, path)
            except FileExistsError:
                return False
            return True

        return self._try(lambda: self._write(key, [data], place))

    def keys(self, prefix: str) -> list[str]:
        def found() -> list[str]:
            paths = (path for path in (self._path / prefix).rglob("*") if path.is_file())
            return sorted(path.relative_to(self._path).as_posix() for path in paths)

        return self._try(found)

    def delete(self, keys: Collection[str]) -> None:
        def unlink() -> None:
            for key in keys:
                (self._path / key).unlink(missing_ok=True)

        self._try(unlink)

    def upload(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        def place(aside: Path, path: Path) -> bool:
            os.replace(aside, path)
            return True

        self._try(lambda: self._write(key, pieces, place))

    def download(self, key: str) -> Iterator[bytes]:
        with open(self._path / key, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def _write(self, key: str, pieces: Iterable[bytes | memoryview], place: Callable[[Path, Path], bool]) -> bool:
        path, aside = self._path / key, self._path / "tmp" / f"{self._mine}-{next(self._serial)}"
        if path.parent not in self._folders:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folders.add(path.parent)
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            is_new = place(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return is_new

    def _try(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            raise LinkError(f"the store {self._path} cannot be used: {error}") from error


class Remote:
    """Objects in a file system of fsspec. `create` needs one whose `pipe_file` knows the mode "create" (S3 does, by a
    conditional put)."""

    def __init__(self, url: str, files: Any, root: str) -> None:
        self._url, self._files, self._root = url, files, root.rstrip("/")

    def get(self, key: str) -> bytes | None:
        try:
            return self._try(lambda: bytes(self._files.cat_file(self._place(key))))
        except FileNotFoundError:
            return None

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._try(lambda: self._files.pipe_file(self._place(key), data, mode="create"))
        except FileExistsError:
            return False
        return True

    def keys(self, prefix: str) -> list[str]:
        def found() -> list[str]:
            self._files.invalidate_cache()
            return sorted(path.removeprefix(self._root).lstrip("/") for path in self._files.find(self._place(prefix)))

        try:
            return self._try(found)
        except FileNotFoundError:
            return []

    def delete(self, keys: Collection[str]) -> None:
        for key in keys:
            try:
                self._try(lambda key=key: self._files.rm_file(self._place(key)))  # type: ignore[misc]
            except FileNotFoundError:
                pass

    def upload(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        def write() -> None:  # if a piece fails, half an object may stay: what names it is written afterwards
            with self._files.open(self._place(key), "wb") as file:
                for piece in pieces:
                    file.write(piece)

        self._try(write)

    def download(self, key: str) -> Iterator[bytes]:
        with self._try(lambda: self._files.open(self._place(key), "rb")) as file:
            while piece := self._try(lambda: file.read(PIECE_BYTES)):
                yield piece

    def _place(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _try(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # each package has errors of its own
            if "PreconditionFailed" in repr(error):  # of a conditional put
                raise FileExistsError(str(error)) from error
            raise LinkError(f"the store {self._url} cannot be used: {error}") from error
