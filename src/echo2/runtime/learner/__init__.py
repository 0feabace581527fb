"""The learner's process."""
