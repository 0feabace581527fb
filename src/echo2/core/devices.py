"""Finds devices by name and reports memory, for the learner and the engines. Imports torch only when called."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.core.errors import UserError
from echo2.core.types import Hardware

if TYPE_CHECKING:
    import torch

#: Parts of the messages of errors that have no exception type of their own: of torch's CPU allocator, and of libraries
#: that allocate on a GPU by themselves.
MEMORY_IS_FULL = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "[malloc] Unable to allocate",
    "[metal::malloc]",
)
#: cuBLAS computes the same bits each time only with a workspace of this kind, which it reads when it is first used.
WORKSPACE_VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
#: M_MMAP_THRESHOLD of malloc.h.
MALLOC_MMAP_THRESHOLD = -3
#: Weights of fewer bytes than this leave what they free with malloc.
KEPT_FREE_BYTES = 64 << 20
#: Characters of torch's reason why a device cannot be used: it may list all kernels.
ERROR_CHARS = 200
NO_TORCH = "This command computes with torch, which is not installed here: pip install 'echo2[train]'."
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
#: One of these exists where torch may find a GPU: NVIDIA's driver, its device in a container, WSL, AMD's driver.
GPU_SIGNS = (NVIDIA_DRIVER, Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_limit_bytes: int | None = None


def require_torch() -> None:
    """Raises UserError if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(NO_TORCH)


def require_bitsandbytes(setting: str) -> None:
    """Raises UserError if bitsandbytes, which this setting needs, is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{setting} computes with bitsandbytes, which is not installed here: pip install 'echo2[low-memory]', or "
            "pip install --no-deps bitsandbytes where nothing else should change."
        )


def forbid_torch() -> None:
    """Make `import torch` fail in this process: it takes seconds and hundreds of megabytes. `transformers` reads
    tokenizers without torch; its notice about that is switched off.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's own way to stop an import
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def this_machine() -> Hardware:
    """Return the memory of this machine, or of the container that limits it, and of each GPU. GPUs are reported only
    where torch and a GPU's driver are installed.
    """
    total = _number(MEMINFO) * 1024 or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS has no /proc
    bound = _number(CGROUP / "memory.max")
    memory_bytes = min(total, bound) if bound else total
    if not any(sign.exists() for sign in GPU_SIGNS) or importlib.util.find_spec("torch") is None:
        return Hardware(memory_bytes)
    import torch

    devices = range(torch.cuda.device_count())
    return Hardware(memory_bytes, tuple(torch.cuda.get_device_properties(device).total_memory for device in devices))


def _number(path: Path, name: str = "") -> int:
    """Return the first whole number in a file's first line that begins with `name`; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    words = next((line.split() for line in lines if line.startswith(name)), [])
    return next((int(word) for word in words if word.isdecimal()), 0)


def map_large_blocks() -> None:
    """Make glibc's malloc map blocks of 256 KiB and more one by one from now on: each returns to the system when it is
    freed. Otherwise the gaps between tensors of different sizes would stay with the process, and grow.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MALLOC_MMAP_THRESHOLD, 1 << 18)


def return_freed_memory(num_bytes: int) -> None:
    """Give what was freed, and glibc's malloc keeps for later, back to the system. Between two sets of weights of
    `num_bytes` that is as much as another set. Small sets stay: the process would soon ask for their pages again, which
    took a tenth of the demo's worker."""
    if num_bytes < KEPT_FREE_BYTES:
        return
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device, or the machine, has no memory left."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(part in str(error) for part in MEMORY_IS_FULL)


def compute_deterministically() -> None:
    """From now on, the same computation on a GPU gives the same bits. Call it before the first matrix product there."""
    import torch

    os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACE)
    torch.use_deterministic_algorithms(True)


class Beside:
    """Work on a device beside what is queued there: it follows only what was queued when this was made. Copies of
    weights would otherwise wait, piece by piece, for passes that neither read nor write them. On a CPU this does
    nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._ready: torch.cuda.Event | None = None
        self._device = device
        if device.type == "cuda":
            import torch

            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))

    @contextmanager
    def work(self) -> Iterator[None]:
        """Inside, work of this thread is done beside the rest. It is done when the context ends."""
        if self._ready is None:
            yield
            return
        import torch

        stream = _second_stream(self._device)
        stream.wait_event(self._ready)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:  # also after an error: memory that is freed then may be in use there
            stream.synchronize()


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)


def pick_device(name: str, any_kind: bool = False) -> torch.device:
    """Return the torch device of a name: cpu, cuda, cuda:0, mps, xpu ..., auto (the first GPU, if any) or auto:N
    (`nth_device`). `any_kind`: with auto, also accelerators that are not CUDA GPUs (ROCm's GPUs are called cuda, too).

    From then on, attention on a GPU never runs in cuDNN, which torch prefers on some cards. cuDNN builds a plan for
    each new shape, in tens of milliseconds. An engine has a new shape at every token, a learner at most micro-batches.
    torch's other kernels take any shape (benchmarks/gpu.py measures both).

    Raises:
        UserError: the name is unknown, or there is no such device.
    """
    import torch

    try:
        # "cuda" becomes "cuda:0", as tensors there have it.
        chosen = nth_device(name, torch.cuda.device_count(), _other_accelerator() if any_kind else ("cpu", 1))
        device = torch.empty(0, device=chosen).device
        if device.type == "meta":
            raise RuntimeError("it holds no values")
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0][:ERROR_CHARS]
        raise UserError(
            f"The device {name!r} cannot be used: {why}. Use cpu, cuda, cuda:0, auto, or another kind that this torch "
            "was built for (mps on a Mac, xpu with Intel's GPUs)."
        ) from error
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def nth_device(name: str, num_gpus: int, other: tuple[str, int] = ("cpu", 1)) -> str:
    """Resolve auto:N to GPU N modulo the number of GPUs, so that the processes of one machine share its GPUs. `auto` is
    auto:0; without a GPU both are of the `other` kind, of which there are so many. Other names are returned unchanged.
    """
    kind, _, number = name.partition(":")
    if kind != "auto" or not (number or "0").isdecimal():
        return name
    kind, count = ("cuda", num_gpus) if num_gpus else other
    return f"{kind}:{int(number or 0) % count}" if kind not in ("cpu", "mps") else kind


def _other_accelerator() -> tuple[str, int]:
    """Return the kind of accelerator that torch finds here, and how many there are; the CPU if it finds none."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu", 1) if device is None else (device.type, max(1, torch.accelerator.device_count()))


def exact(values: torch.Tensor) -> torch.Tensor:
    """Return these values where float64 is computed: where they are, or on the CPU if their device has none."""
    return values if has_float64(values.device.type) else values.cpu()


def exact_device(device: torch.device) -> torch.device:
    """Return where `exact` puts the values of a device."""
    import torch

    return device if has_float64(device.type) else torch.device("cpu")


@cache
def has_float64(kind: str) -> bool:
    """Whether devices of this kind compute float64: a Mac's GPU does not, nor do some of Intel's."""
    if kind in ("cpu", "cuda", "meta"):
        return True
    import torch

    try:
        return torch.ones(2, dtype=torch.float64, device=kind).cumsum(0).tolist() == [1.0, 2.0]
    except (TypeError, RuntimeError):
        return False


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has another memory than the CPU, which a Mac's GPU shares."""
    return device.type not in ("cpu", "mps")


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes still available on a device; for a CPU, see `available_memory_bytes`."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if has_own_memory(device):
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device))
    return available_memory_bytes()


def limit_memory(num_bytes: int) -> None:
    """From now on, this process counts as available only what it lacks of so many bytes."""
    global _limit_bytes
    _limit_bytes = num_bytes


def available_memory_bytes() -> int:
    """Return the bytes still available on this machine, or in the container that limits it. If the system does not
    report available memory, return all memory of the machine.
    """
    available = _number(MEMINFO, "MemAvailable:") * 1024
    if not available and sys.platform == "darwin":
        import psutil

        available = int(psutil.virtual_memory().available)
    elif not available:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        available = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    if _limit_bytes is not None:
        import psutil

        available = min(available, max(0, _limit_bytes - psutil.Process().memory_info().rss))
    bound = _number(CGROUP / "memory.max")
    if not bound:
        return available
    cached = sum(_number(CGROUP / "memory.stat", f"{kind}_file ") for kind in ("active", "inactive"))
    return min(available, max(0, bound - _number(CGROUP / "memory.current") + cached))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
