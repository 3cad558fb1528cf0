"""Ask the agent to stop its ranks: `stop.py FOLDER/NODE SECONDS`. The container stays until its files are collected.

SIGINT, because an agent that gets SIGTERM, which is how Kubernetes ends a pod, does not wait for that.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    node = Path(sys.argv[1])
    seconds = sys.argv[2]
    with suppress(OSError):  # a full disk: the agent then waits as long as the job's own grace
        (node.parent / "grace").write_text(seconds + "\n")
    status = Path(f"{node}.json")
    os.kill(json.loads(status.read_text())["pid"] if status.exists() else 1, signal.SIGINT)
    print("asked")
