"""Jobs of which only some pods found a machine: they give it back, and try again later.

Without gang scheduling, two jobs can each hold half of the GPUs and wait for the other half for ever. Kueue admits all
pods of a job or none, so with `kueue_queue` no job is half started; but most namespaces have no Kueue. A restart that
meets an exhausted quota tries again in the same way.
"""

import random
import time
from dataclasses import dataclass, field

from cluster.backends.awake_clock import AwakeClock
from cluster.backends.kubernetes.waiting import PodState

#: The shortest and the longest time before another try, in seconds.
_SHORTEST_S = 5.0
_LONGEST_S = 60.0


def is_half_started(states: list[PodState]) -> bool:
    """Return whether some pods have a machine while others wait for free resources."""
    return any(state.host for state in states) and any(state.wants_room for state in states)


@dataclass
class Retries:
    """How long an attempt has been half started, and when its pods are created again."""

    half_since: float | None = None
    tries: int = 0
    due_at: float | None = None
    why: str = ""
    #: The kinds of objects to create then.
    kinds: tuple[str, ...] = ("Pod",)
    clock: AwakeClock = field(default_factory=AwakeClock)

    def note(self, half_started: bool) -> float:
        """Note the state of the pods; return for how many awake seconds the attempt has been half started."""
        if not half_started:
            self.half_since = None
            return 0.0
        if self.half_since is None:
            self.half_since = self.clock()
        return self.clock() - self.half_since

    def give_up(self, why: str, kinds: tuple[str, ...] = ("Pod",)) -> float:
        """Plan the next try at a random time, so that two jobs do not meet again; return the seconds until then."""
        self.tries += 1
        longest_s = min(_LONGEST_S, _SHORTEST_S * 2**self.tries)
        wait_s = random.uniform(_SHORTEST_S, longest_s)
        self.half_since = None
        self.due_at = self.clock() + wait_s
        self.why = why
        self.kinds = kinds
        return wait_s

    @property
    def is_waiting(self) -> bool:
        """Whether the pods do not exist at present, because the next try is later."""
        return self.due_at is not None

    @property
    def detail(self) -> str:
        """What a node waits for in that time."""
        at = time.localtime(time.time() + (self.due_at or 0.0) - self.clock())
        return f"{self.why}; trying again at {time.strftime('%H:%M', at)}"
