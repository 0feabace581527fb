"""The head's process: the planner's real driver, and what it looks after."""
