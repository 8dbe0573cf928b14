"""`python -m mezzo` is the `mezzo` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
