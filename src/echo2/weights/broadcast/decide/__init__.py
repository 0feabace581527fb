"""Which machine fetches which stripe of chunks from which, and what a fetcher does next."""
