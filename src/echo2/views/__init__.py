"""Displays of a run for people. `run_view` reads a run directory; the other modules show its state."""
