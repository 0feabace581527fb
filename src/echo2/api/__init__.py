"""echo2 from Python: `echo2.train(...)` and what it returns. The command line starts and reads the same runs."""
