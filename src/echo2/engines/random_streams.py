"""Counter-based uniform random numbers: number t of stream (seed, sample) is a pure function of the three.

No state is kept, so a row's randomness does not depend on which rows share its batch, on the device, or on when it
runs. The generator is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def derived_seed(seed: int, sample: int, turn: int) -> int:
    """Return a separate 63-bit seed for every turn of every sample."""
    (of_sample,) = stream_keys([seed], [sample])
    (of_turn,) = stream_keys([int(of_sample)], [turn])
    return int(of_turn) >> 1


def finalise(values: Keys) -> Keys:
    """splitmix64's output function: a bijection of 64-bit integers in which every input bit reaches every output
    bit."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def stream_keys(seeds: Sequence[int], samples: Sequence[int]) -> Keys:
    """A 64-bit key for each (seed, sample) pair."""
    seed_B = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    sample_B = np.array(samples, dtype=np.uint64)
    return finalise(finalise(seed_B + _GAMMA) ^ ((sample_B + np.uint64(1)) * _GAMMA))


def uniforms(keys_B: Keys, token_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Number `token_B` of each stream: multiples of 2^-53 in [0, 1)."""
    step_B = (token_B + 1).astype(np.uint64) * _GAMMA
    return (finalise(keys_B + step_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53
