"""What all deciders share: the state machine, the seeds of groups, a heap, a model's context."""
