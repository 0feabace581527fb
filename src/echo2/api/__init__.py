"""The Python interface. The reader of docstrings behind the site finds only packages that have such a file."""
