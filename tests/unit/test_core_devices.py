"""How much memory there is, by the files of a system and of a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import house
from echo2.core import devices
from echo2.core.errors import UserError

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


# ---- devices of other kinds --------------------------------------------------------------------------------------


def sampled(device: str) -> dict[str, Any]:
    """What the engines sample on a machine whose accelerator is the stand-in."""
    paths = os.pathsep.join(str(house.REPOSITORY / folder) for folder in ("src", "tests"))
    command = [sys.executable, str(house.REPOSITORY / "tests" / "standin_device.py"), device]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_engines_sample_and_check_on_a_device_of_another_kind_without_float64_by_name_and_by_themselves() -> None:
    """As Macs' GPUs, and some of Intel's: what needs float64 is computed on the CPU."""
    on_cpu, by_itself, by_name = sampled("cpu"), sampled("auto:3"), sampled("cells")
    for engine in ("compact", "transformers"):
        wanted = on_cpu[engine]
        assert [found[engine]["device"] for found in (on_cpu, by_itself, by_name)] == ["cpu", "cells", "cells"]
        for there in (by_itself[engine], by_name[engine]):
            assert there["tokens"] == wanted["tokens"]
            for name in ("logprobs", "read"):
                for mine, other in zip(there[name], wanted[name], strict=True):
                    assert mine == pytest.approx(other, abs=1e-5)


def test_processes_share_accelerators_of_another_kind_and_a_mac_has_one() -> None:
    assert [devices.nth_device(f"auto:{number}", 0, ("xpu", 2)) for number in range(3)] == ["xpu:0", "xpu:1", "xpu:0"]
    assert devices.nth_device("auto:3", 0, ("mps", 1)) == "mps"
    assert devices.nth_device("auto:3", 2, ("xpu", 2)) == "cuda:1"
    assert devices.nth_device("mps", 0) == "mps"


@pytest.mark.parametrize("name", ["mps", "xpu", "gpu", "meta"])
def test_a_device_that_is_not_here_is_refused_in_a_line_that_names_others(name: str) -> None:
    with pytest.raises(UserError, match=f"device '{name}' cannot be used.*mps on a Mac, xpu with Intel") as refused:
        devices.pick_device(name)
    assert len(str(refused.value)) < 500


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_only_large_weights_give_freed_memory_back() -> None:
    """Small ones are there again in a moment, and each page that was given back is a fault then."""
    program = """
import os
from pathlib import Path
from echo2.core.devices import KEPT_FREE_BYTES, return_freed_memory
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
blocks = [bytearray(60_000) for _ in range(2000)]
last = bytearray(60_000)  # malloc gives back what is free at the end by itself
before = resident()
blocks.clear()
for num_bytes in (0, KEPT_FREE_BYTES - 1, KEPT_FREE_BYTES):
    return_freed_memory(num_bytes)
    print(before - resident() >= 100, end=" ")
"""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "PYTHONMALLOC": "malloc"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["False", "False", "True"]
