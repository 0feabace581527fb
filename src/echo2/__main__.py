"""`python -m echo2` is the command `echo2`."""

import sys

from echo2.cli import main

if __name__ == "__main__":
    sys.exit(main())
