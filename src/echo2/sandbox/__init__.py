"""Processes that run the user's code, and how that code is found."""
