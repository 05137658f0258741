"""Train: `python train.py experiment=quickstart`, the same as `seg4k train experiment=quickstart`."""

import sys

from seg4k.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
