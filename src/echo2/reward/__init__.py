"""Room 3 of the path: from a rollout to its score, by built-in functions or the user's own."""
