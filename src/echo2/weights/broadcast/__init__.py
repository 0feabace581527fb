"""Spreads snapshots: the head's origin, the workers that relay, and what carries their chunks."""
