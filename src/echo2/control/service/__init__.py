"""Decisions of the service: the order of a model's requests, and whose turn it is."""
