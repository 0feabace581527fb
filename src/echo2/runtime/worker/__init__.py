"""The worker's process."""
