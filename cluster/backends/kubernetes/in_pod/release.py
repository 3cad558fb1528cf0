"""Let an agent whose ranks have ended end, because its files are collected: `release.py FOLDER/NODE`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    Path(sys.argv[1] + ".collected").touch()
