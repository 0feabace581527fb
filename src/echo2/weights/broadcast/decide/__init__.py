"""Who fetches which stripe of chunks from whom, and what a fetcher does next."""
