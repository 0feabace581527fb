"""What people see of a run. `run_view` reads a run directory; the other modules show it."""
