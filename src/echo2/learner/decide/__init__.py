"""What decides about a learner before it runs: the forecast of its memory."""
