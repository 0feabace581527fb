"""What a run records: the ledger and its driver, the log of events, metrics, rollouts, costs."""
