"""Processes that run the user's code, and how this code is found."""
