"""Snapshots on a disk: chunks in packs, what a worker has installed, what the head retains."""
