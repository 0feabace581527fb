"""Formats quantities for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Format a duration in seconds; from two minutes on in minutes, from two hours on in hours."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.3g} s"


def size(num_bytes: float) -> str:
    """Format a number of bytes with three significant digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"
