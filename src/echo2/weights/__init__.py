"""Weights on their way from the learner to the engines: their format, their files, their broadcast."""
