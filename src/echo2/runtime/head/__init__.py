"""The head's process: it drives the planner and serves workers and the learner."""
