"""A place for objects, named by URL, that outlives this machine: a directory, or whatever fsspec reaches (s3://, gs://,
...). Objects are whole or absent, and a key can be created once: of two processes that create it, one gets an error.

Every method raises LinkError when the place cannot be reached; then the object may be there or not.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from echo2.core.errors import LinkError, UserError

log = logging.getLogger(__name__)

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
        UserError: no installed package reaches this kind of URL, or every user may write to another's directory.
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


def check_store(url: str) -> None:
    """Check what can be known of a place before a run begins, and leave nothing there.

    Raises:
        UserError: as `open_objects`, or nothing can be made in the directory.
    """
    kind, mark, rest = url.partition("://")
    if mark and kind != "file":
        open_objects(url)
        return
    path = Path(rest if mark else url).expanduser().absolute()
    try:
        with tempfile.TemporaryDirectory(dir=next(folder for folder in (path, *path.parents) if folder.exists())):
            pass
    except OSError as error:
        raise UserError(
            f"head.store = {url!r} cannot be used: {error}. Name a directory that you may write."
        ) from error


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield a file in pieces. Raises OSError."""
    with path.open("rb") as file:
        yield from _read(file)


def _read(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


@contextmanager
def _reached(
    place: str, errors: type[Exception] = OSError, answers: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise LinkError for `errors` of a place other than its `answers`, and our own."""
    try:
        yield
    except UserError:
        raise
    except answers:
        raise
    except errors as error:
        if "PreconditionFailed" in repr(error):  # of a conditional put
            raise FileExistsError(str(error)) from error
        raise LinkError(f"the store {place} cannot be used: {error}") from error


def _checked(key: str, place: str) -> str:
    """Return the key. Raises UserError: it leads out of the store; another head may have written its name there."""
    if not all(part not in ("", ".", "..") and "\0" not in part for part in key.split("/")):
        raise UserError(f"The store {place} names an object outside of it: {key!r}. Do not use this store.")
    return key


def _check_private(folder: Path) -> None:
    """Raises UserError: every user may write to another user's folder. If it is ours, that may be how its disk shows
    all folders, and is a warning."""
    facts = folder.stat()
    if os.name != "posix" or not facts.st_mode & stat.S_IWOTH:
        return
    complaint = f"every user of this machine may write {folder}, and a user who writes to a store controls its run"
    if facts.st_uid != os.getuid():
        raise UserError(f"head.store: {complaint}. Name a directory of your own.")
    log.warning("head.store: %s. Take that right away: chmod o-w %s", complaint, folder)


class Directory:
    """Objects as files of one directory, private to their owner: each is written aside, synced, and linked in place."""

    def __init__(self, path: Path) -> None:
        self._path, self._serial, self._mine = path, itertools.count(), secrets.token_hex(4)
        self._folders = set[Path]()
        with _reached(str(path)):
            for folder in (path, path / "tmp"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_private(folder)

    def get(self, key: str) -> bytes | None:
        with _reached(str(self._path)):
            try:
                return self._place(key).read_bytes()
            except FileNotFoundError:
                return None

    def create(self, key: str, data: bytes) -> bool:
        with self._written(key, [data]) as aside:
            try:
                os.link(aside, self._place(key))
            except FileExistsError:
                return False
        return True

    def keys(self, prefix: str) -> list[str]:
        with _reached(str(self._path)):
            paths = (path for path in (self._path / prefix).rglob("*") if path.is_file())
            return sorted(path.relative_to(self._path).as_posix() for path in paths)

    def delete(self, keys: Collection[str]) -> None:
        with _reached(str(self._path)):
            for key in keys:
                self._place(key).unlink(missing_ok=True)

    def upload(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        with self._written(key, pieces) as aside:
            os.replace(aside, self._place(key))

    def download(self, key: str) -> Iterator[bytes]:
        with _reached(str(self._path), answers=(FileNotFoundError,)):
            yield from pieces_of(self._place(key))

    @contextmanager
    def _written(self, key: str, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
        """Give the file with these pieces, to be put in the key's place; then that is durable."""
        folder, aside = self._place(key).parent, self._path / "tmp" / f"{self._mine}-{next(self._serial)}"
        with _reached(str(self._path)):
            if folder not in self._folders:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._folders.add(folder)
            try:
                with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.writelines(pieces)
                    file.flush()
                    os.fsync(file.fileno())
                yield aside
            finally:
                aside.unlink(missing_ok=True)
            opened = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)

    def _place(self, key: str) -> Path:
        return self._path / _checked(key, str(self._path))


class Remote:
    """Objects in a file system of fsspec. `create` needs one whose `pipe_file` knows the mode "create" (S3 does, by a
    conditional put)."""

    def __init__(self, url: str, files: Any, root: str) -> None:
        self._url, self._files, self._root = url, files, root.rstrip("/")

    def get(self, key: str) -> bytes | None:
        try:
            with self._reached():
                return bytes(self._files.cat_file(self._place(key)))
        except FileNotFoundError:
            return None

    def create(self, key: str, data: bytes) -> bool:
        try:
            with self._reached():
                self._files.pipe_file(self._place(key), data, mode="create")
        except FileExistsError:
            return False
        return True

    def keys(self, prefix: str) -> list[str]:
        try:
            with self._reached():
                self._files.invalidate_cache()
                paths = self._files.find(self._place(prefix))
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(self._root).lstrip("/") for path in paths)

    def delete(self, keys: Collection[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError), self._reached():
                self._files.rm_file(self._place(key))

    def upload(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        # If a piece fails, half an object may stay: what names it is written afterwards.
        with self._reached(), self._files.open(self._place(key), "wb") as file:
            file.writelines(pieces)

    def download(self, key: str) -> Iterator[bytes]:
        with self._reached(), self._files.open(self._place(key), "rb") as file:
            yield from _read(file)

    def _place(self, key: str) -> str:
        return f"{self._root}/{_checked(key, self._url)}"

    def _reached(self) -> AbstractContextManager[None]:  # each package has errors of its own
        return _reached(self._url, Exception, (FileNotFoundError, FileExistsError))
