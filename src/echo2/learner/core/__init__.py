"""Gradients and weights: batches, losses, the model over its ranks, checkpoints, publication."""
