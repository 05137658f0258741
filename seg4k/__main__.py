"""`python -m seg4k VERB`, the same as `seg4k VERB`."""

import sys

from seg4k.cli import main

if __name__ == "__main__":
    sys.exit(main())
