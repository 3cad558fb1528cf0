"""A clock that counts only while the launcher itself runs. Every timeout of a job uses one.

A closed laptop lid or Ctrl-Z suspends the launcher while the job continues, and after the resume the network needs some
seconds to return. With wall-clock time every node would then appear silent for the whole suspension, and be lost. A
thread ticks each second: a gap of more than 5 s between two ticks is a suspension. `AwakeTime.seconds` counts neither
the gap nor a grace period of at most 20 s after it.
"""

import functools
import threading
import time

_TICK_S = 1.0
#: A longer gap between two ticks is a suspension of the launcher.
_SUSPENDED_AFTER_S = 5.0
#: Time for the network to return after a suspension.
RESUME_GRACE_S = 20.0


class AwakeTime:
    """Seconds in which the launcher was not suspended, from two clocks: one may stop, the other may be set."""

    def __init__(self, monotonic: float, wall: float) -> None:
        self.seconds = 0.0
        self.suspensions = 0
        self._last = (monotonic, wall)
        self._grace_until = monotonic
        self._lock = threading.Lock()

    def tick(self, monotonic: float, wall: float) -> None:
        """Add the time since the last tick, except for suspensions and the grace period after them."""
        with self._lock:
            last_monotonic, last_wall = self._last
            gap_s = max(monotonic - last_monotonic, wall - last_wall)
            if gap_s > _SUSPENDED_AFTER_S:
                self.suspensions += 1
                self._grace_until = monotonic + min(RESUME_GRACE_S, 2 * gap_s)
            self.seconds += max(0.0, monotonic - max(last_monotonic, self._grace_until))
            self._last = (monotonic, wall)


def _boot_time() -> float:
    """Return a time that counts while the machine is suspended. On Linux it is one that cannot be set."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_REALTIME))


@functools.cache
def awake_time() -> AwakeTime:
    """Return the awake time of this process. A thread ticks, because the main thread may block for long."""
    awake = AwakeTime(time.monotonic(), _boot_time())

    def run() -> None:
        while True:
            awake.tick(time.monotonic(), _boot_time())
            time.sleep(_TICK_S)

    threading.Thread(target=run, daemon=True).start()
    return awake


class AwakeClock:
    """Wall-clock time without the suspensions since this clock was created."""

    def __init__(self) -> None:
        self._zero = 0.0
        self._zero = time.time() - self()

    def __call__(self) -> float:
        """Return seconds since 1970, less the suspensions."""
        awake_time().tick(time.monotonic(), _boot_time())
        return self._zero + awake_time().seconds
