"""Seeds by (run, group): the random numbers of a group do not depend on which worker samples it, or when."""

from __future__ import annotations

from echo2.core.types import GroupRef

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers that spreads every input bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def group_seed(run_seed: int, group: GroupRef) -> int:
    """Return the 63-bit seed of a group; the engine derives the seed of each sample from it."""
    kind = {"train": 1, "eval": 2}[group.kind]
    return mix(mix(mix(run_seed) ^ group.number) ^ kind) >> 1
