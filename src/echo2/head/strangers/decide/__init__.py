"""Whom to check, what a verdict means, and what a stranger may hold."""
