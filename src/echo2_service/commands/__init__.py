"""The commands of the service: serve, keys, status."""
