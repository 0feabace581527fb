"""From a configuration file to a run: checks, starts, supervises and evaluates it."""
