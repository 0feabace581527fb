"""The machines of a run: what they cost, and how they are rented."""
