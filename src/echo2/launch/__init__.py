"""Starts a run on this machine: checks its settings, supervises its processes, resumes it."""
