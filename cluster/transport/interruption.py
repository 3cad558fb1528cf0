"""Whether Ctrl-C ends the work that is running in other threads."""

import threading

from cluster.errors import LaunchError

interrupted = threading.Event()


def refuse_interrupted() -> None:
    """Raise LaunchError if Ctrl-C ends the running work."""
    if interrupted.is_set():
        raise LaunchError("this machine: interrupted")
