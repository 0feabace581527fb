"""Before and after a run: predictions (`plan`, `probe`, `simulate`) and costs (`cost`)."""
