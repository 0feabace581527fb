"""echo2 from Python: `echo2.train(...)` and the `Run` it returns. The command line uses the same runs."""
