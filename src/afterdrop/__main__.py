"""`python -m afterdrop` is the command line."""

import sys

from afterdrop.cli import main

if __name__ == "__main__":
    sys.exit(main())
