"""The planner: decides which worker samples which group, what the learner is fed, and which machines work."""
