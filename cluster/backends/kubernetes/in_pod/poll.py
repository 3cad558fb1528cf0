"""Print a node's status file, and its log from an offset: `poll.py FOLDER/NODE OFFSET BYTES`, in one line of JSON."""

import base64
import json
import sys
from pathlib import Path


def read(path: str, start: int, size: int) -> bytes:
    """Return at most `size` bytes of a file, b"" if there is none."""
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            return file.read(size)
    except FileNotFoundError:
        return b""


if __name__ == "__main__":
    name = sys.argv[1]
    offset = int(sys.argv[2])
    most = int(sys.argv[3])
    # The status first: a node that has ended has written its last line.
    status = read(name + ".json", 0, 1 << 20).decode(errors="replace")
    print(json.dumps({"status": status, "log": base64.b64encode(read(name + ".log", offset, most)).decode()}))
