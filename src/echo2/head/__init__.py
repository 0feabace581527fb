"""The head: it decides, records, and serves the learner and the workers."""
