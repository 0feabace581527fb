"""The scheduler of a worker's leases, and the messages it handles."""
