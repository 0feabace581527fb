"""What people look at. `run_view` reads a run directory, once and for all of them; the others show it."""
