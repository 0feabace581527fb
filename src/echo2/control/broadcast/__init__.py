"""Decides who sends which chunk of a snapshot to whom: the origin's plan, and each worker's fetches."""
