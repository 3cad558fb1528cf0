"""Long waits: who waits says for what, and the command line shows it if the wait lasts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: A wait is shown once it has lasted for so long, and again after each interval.
SHOW_AFTER_S = 3.0
AGAIN_S = 10.0
_show: Callable[[str, bool], None] | None = None


@contextmanager
def waiting(what: str | Callable[[], str], limit_s: float | None = None) -> Iterator[None]:
    """Show a wait of at most `limit_s` if it lasts. `what` is `digits-7f3a to exit on gpu-a`, or returns that text."""
    began = time.monotonic()
    ended = threading.Event()

    def limit() -> str:
        return "" if limit_s is None else f" up to {max(1.0, began + limit_s - time.monotonic()):.0f} s"

    def show() -> None:
        pause_s = SHOW_AFTER_S
        is_first = True
        while not ended.wait(pause_s):
            text = what if isinstance(what, str) else what()
            if text and _show is not None:
                _show(f"waiting{limit()} for {text}", is_first)
            pause_s = AGAIN_S
            is_first = False

    threading.Thread(target=show, name="wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def show_with(show: Callable[[str, bool], None]) -> None:
    """Call `show` for each wait that lasts, in a thread, with a sentence and whether it is the first for this wait."""
    global _show
    _show = show
