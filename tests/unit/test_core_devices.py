"""How much memory there is, by the files of a system and of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echo2.core import devices

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB, 60 of them free; its cgroup has no files yet."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {60 << 20} kB\n")
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    return tmp_path


def test_a_container_bounds_the_memory(system: Path) -> None:
    assert (devices.this_machine().memory_bytes, devices.available_memory_bytes()) == (64 * GIB, 60 * GIB)
    (system / "memory.max").write_text("max\n")
    (system / "memory.current").write_text(f"{3 * GIB}\n")
    assert (devices.this_machine().memory_bytes, devices.available_memory_bytes()) == (64 * GIB, 60 * GIB)
    (system / "memory.max").write_text(f"{4 * GIB}\n")
    assert (devices.this_machine().memory_bytes, devices.available_memory_bytes()) == (4 * GIB, GIB)
    (system / "memory.stat").write_text(f"anon 7\nfile 8\ninactive_file {GIB}\nactive_file {GIB // 2}\n")
    assert devices.available_memory_bytes() == 2.5 * GIB  # the cache of files gives way
    (system / "memory.current").write_text(f"{9 * GIB}\n")
    assert devices.available_memory_bytes() == 0


def test_a_process_that_is_limited_has_what_it_lacks_of_its_limit(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_limit_bytes", None)
    devices.limit_memory(8 * GIB)
    assert 4 * GIB < devices.available_memory_bytes() < 8 * GIB  # it has what all tests of this process have used
    devices.limit_memory(1)
    assert devices.available_memory_bytes() == 0
    devices.limit_memory(1 << 50)
    assert devices.available_memory_bytes() == 60 * GIB


def test_a_system_that_does_not_say_has_all_of_its_memory(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is hidden; macOS has none, and no SC_AVPHYS_PAGES either."""
    (system / "meminfo").unlink()
    assert devices.this_machine().memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = {name: number for name, number in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", names)
    assert devices.available_memory_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
