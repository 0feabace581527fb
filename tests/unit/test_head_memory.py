"""The head stores and hands out snapshots of any size in the same memory."""

from __future__ import annotations

from head_memory import peak_bytes


def test_the_heads_memory_does_not_grow_with_the_model() -> None:
    small, large = peak_bytes(4 << 20), peak_bytes(64 << 20)
    assert large - small < 12 << 20, f"{small} and {large} bytes for models of 4 and 64 MiB"
