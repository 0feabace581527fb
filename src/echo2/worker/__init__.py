"""The rollout worker: what it decides, its process, its samples and its weights."""
