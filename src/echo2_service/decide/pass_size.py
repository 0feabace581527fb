"""Decides how many tokens of an adapter's data one forward and backward pass holds, after memory ran out.

The trainer halves a pass that finds no memory. What took the memory, another process or another tenant's adapters, may
be gone soon. So after some passes that found enough, twice as many tokens are tried; each failure doubles the number of
passes until the next trial, up to a limit. An adapter has a size of its own, because other sums in other passes change
the last bits of its results, and a tenant whose data take the memory must not change another tenant's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Passes that find enough memory before twice as many tokens are tried: at first, and after many failures. A trial that
#: fails costs about a pass.
PATIENCE_PASSES_MIN, PATIENCE_PASSES_MAX = 16, 1024


@dataclass(slots=True)
class PassSize:
    """`tokens`: maximum of the next pass, at most `tokens_max`."""

    tokens_max: int
    tokens: int = 0
    _patience: int = PATIENCE_PASSES_MIN
    _num_well: int = 0  # passes of this size that found enough memory

    def __post_init__(self) -> None:
        self.tokens = self.tokens_max

    def passed(self, tokens: int) -> None:
        """Record that a pass was made. `tokens`: the trainer's limit afterwards, less than before if it was halved."""
        if tokens < self.tokens:
            self.tokens, self._num_well = max(1, tokens), 0
            self._patience = min(2 * self._patience, PATIENCE_PASSES_MAX)
            return
        self._num_well += 1
        if self._num_well < self._patience:
            return
        self._num_well = 0
        if self.tokens == self.tokens_max:
            self._patience = PATIENCE_PASSES_MIN
        self.tokens = min(2 * self.tokens, self.tokens_max)
