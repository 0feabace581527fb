"""What a rollout is: turns, environments, harnesses, logs, and the check that its tokens were drawn."""
