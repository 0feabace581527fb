"""Decides which peer sends which chunk of a snapshot to which worker: the origin's plan, and each worker's fetches."""
