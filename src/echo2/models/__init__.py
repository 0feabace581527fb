"""A model by itself: evaluate it, talk to it, export it, fine-tune it before a run."""
