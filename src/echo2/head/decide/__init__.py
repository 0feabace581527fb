"""The planner: a function of events, without clock, randomness, I/O or logging."""
