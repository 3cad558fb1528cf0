"""Ask the agent, process 1, to stop its ranks: `stop.py FOLDER SECONDS`. The container stays until it is collected.

SIGINT, because an agent that gets SIGTERM, which is how Kubernetes ends a pod, does not wait for that.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    folder, seconds = sys.argv[1:]
    with suppress(OSError):  # no folder yet, or a full disk: the agent then waits as long as the job's own grace
        Path(folder, "grace").write_text(seconds + "\n")
    os.kill(1, signal.SIGINT)
    print("asked")
