"""What a worker does next."""
