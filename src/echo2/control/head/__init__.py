"""The planner: which group is sampled by whom, what the learner is fed, which machines work."""
