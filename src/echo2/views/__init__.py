"""What people look at: the status of a run, and its display."""
