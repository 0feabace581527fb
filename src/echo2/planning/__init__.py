"""Before and after a run: what it will take (`plan`, `probe`, `simulate`) and what it took (`cost`)."""
