"""Packs of chunks: what is needed of one is moved, once, and lost to no error that passes."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from echo2.core.errors import UserError
from echo2.weights.store.store import ChunkStore, Packs


@contextmanager
def no_more_files() -> Iterator[None]:
    """The operating system refuses to open any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def half_forgotten(path: Path) -> tuple[Packs, dict[bytes, bytes]]:
    """Most of a pack may go; what is to stay of it."""
    packs, chunks = Packs(path), {blake3(data).digest(): data for data in (os.urandom(1000) for _ in range(4))}
    packs.append(chunks.items())
    for name in list(chunks)[1:]:
        packs.forget(name)
        del chunks[name]
    return packs, chunks


def contents(packs: Packs) -> dict[bytes, bytes]:
    places = {name: packs.place(name) for name in packs.hashes()}
    return {name: packs.read(place) for name, place in places.items() if place is not None}


def test_packs_are_continued_up_to_a_size_and_go_when_little_of_them_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.weights.store.store.PACK_BYTES", 4000)
    packs, chunks = Packs(tmp_path), {blake3(data).digest(): data for data in (os.urandom(1000) for _ in range(8))}
    packs.append(chunks.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pack", "1.pack"]
    for name in list(chunks)[1:4]:
        packs.forget(name)
        del chunks[name]
    packs.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pack", "2.pack"], "one chunk was moved"
    for opened in (packs, Packs(tmp_path)):
        places = {name: opened.place(name) for name in opened.hashes()}
        assert {name: opened.read(place) for name, place in places.items() if place is not None} == chunks


def test_a_chunk_stays_when_no_file_can_be_opened(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store")
    hash_ = blake3(b"abcd").digest()
    store.put(hash_, b"abcd")
    with no_more_files(), pytest.raises(UserError, match="ulimit"):
        store.get(hash_)
    assert store.get(hash_) == b"abcd"
    packs, chunks = half_forgotten(tmp_path / "packs")
    with no_more_files():
        packs.sweep()
    assert contents(packs) == chunks
    packs.sweep()
    for opened in (packs, Packs(packs.directory)):
        assert contents(opened) == chunks


def test_a_full_disk_keeps_objects_whose_deletion_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview, start: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    packs, chunks = half_forgotten(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        packs.sweep()
    assert contents(packs) == chunks
    assert (tmp_path / "0.pack").stat().st_size > 4000
    packs.sweep()
    assert not (tmp_path / "0.pack").exists()
    for opened in (packs, Packs(tmp_path)):
        assert contents(opened) == chunks


def test_a_sweep_walks_the_chunks_once_for_all_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.weights.store.store.PACK_BYTES", 1000)
    packs, chunks = Packs(tmp_path), {blake3(data).digest(): data for data in (os.urandom(300) for _ in range(80))}
    packs.append(chunks.items())
    for number, name in enumerate(list(chunks)):
        if number % 4:
            packs.forget(name)
            del chunks[name]
    walks = 0

    class Places(dict[bytes, Any]):
        def items(self) -> Any:
            nonlocal walks
            walks += 1
            return super().items()

    packs._places = Places(packs._places)
    packs.sweep()
    assert walks == 1
    assert contents(packs) == chunks
    assert not (tmp_path / "0.pack").exists()
