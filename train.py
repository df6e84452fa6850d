"""Trains a captioner: `python train.py --data PATH --out runs/NAME` (see `--help`)."""

import sys

from captioner.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
