"""Reinforcement learning as a service: the Tinker and Logits APIs, on the parts of echo2."""
