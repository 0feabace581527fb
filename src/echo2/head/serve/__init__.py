"""The head's process: calls, orders, rewards, status."""
