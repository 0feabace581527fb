"""The learner's way to the head: the session, its calls, and the upload of snapshots."""
