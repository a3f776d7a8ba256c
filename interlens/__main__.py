"""`python -m interlens` is the command line."""

import sys

from interlens.cli import main

if __name__ == "__main__":
    sys.exit(main())
