"""Room 3 of the path: from a rollout to its score, by built-in or user functions, in this process or in one of its own."""
