"""Rewards: scores of rollouts, from built-in functions or the user's own."""
