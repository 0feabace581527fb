"""The worker's scheduler: decides what a worker does next."""
