"""Heartbeats: how each rank learns which ranks are alive and what they do, with one message per machine.

In each interval, every rank writes its heartbeat into the memory that its machine's ranks share. The machine's sender,
its first rank that is alive, puts all of them into the store as one value. Rank 0 reads one value per machine, and
tells the others: it puts what it knows of all ranks into the store as one value, which each sender copies into its
machine's memory.

So 512 ranks on 64 machines need 64 writes, 63 reads by rank 0 and 63 reads by the other senders, instead of 262,144
reads. If rank 0 is frozen, or the store on its machine does not answer, all heartbeats are old.
"""

import json
from dataclasses import dataclass
from typing import Any

from trainer.distributed.neighbours import Neighbours

#: A machine's next rank becomes the sender after this many intervals without a heartbeat of those before it.
_TAKEOVER = 2


@dataclass(frozen=True)
class Heartbeat:
    """Last heartbeat of a rank: finished steps, phase, and seconds since it arrived."""

    number: int
    phase: str
    silent_s: float


def texts_of(size: int) -> int:
    """Return how many texts the ranks of a machine share in a world of `size` ranks.

    First each rank's heartbeat, then what rank 0 knows of each rank, then a number that changes with it.
    """
    return 2 * size + 1


class Heartbeats:
    """The heartbeats of all ranks, as rank 0 knows them. The clock is the caller's."""

    def __init__(
        self, rank: int, neighbours: Neighbours, store: Any, beat_s: float, phase: str, now: float
    ) -> None:
        """All ranks begin in `phase` at `now`. The caller calls `exchange` every `beat_s` seconds."""
        self._rank = rank
        self._store = store
        self._beat_s = beat_s
        self._here = neighbours.of(rank)
        self._texts = neighbours.texts
        self._others = [ranks for ranks in neighbours.machines if 0 not in ranks]
        self._size = sum(map(len, neighbours.machines))
        self._count = 0
        self._version = ""
        self._present: set[str] = set()  # keys of the machines whose first heartbeat is in the store
        # rank -> its last heartbeat as text, and the time of arrival. Rank 0 sees all ranks, others their machine's.
        self._seen = {each: (json.dumps([0, phase, 0]), now) for each in range(self._size)}
        # rank -> finished steps, phase and silent seconds, as rank 0 has published them
        self._known: list[tuple[int, str, float]] = [(0, phase, 0.0)] * self._size
        self._published_at = now

    def exchange(self, number: int, phase: str, now: float) -> None:
        """Send this rank's heartbeat, finished steps and phase, and learn the others'. Raise the store's errors."""
        self._count += 1
        self._texts[self._rank] = json.dumps([number, phase, self._count])
        for rank in self._here:
            self._note(rank, self._texts[rank], now)
        if self._rank == 0:
            self._read_machines(now)
            self._publish(now)
        elif 0 not in self._here and self._is_sender(now):
            beats = {rank: self._texts[rank] for rank in self._here}
            self._store.set(f"beat/{self._here[0]}", json.dumps(beats))
            if self._is_there("beats"):
                for index, text in enumerate(json.loads(self._store.get("beats")), self._size):
                    self._texts[index] = text
        self._learn(now)

    def all(self, now: float) -> dict[int, Heartbeat]:
        """Return each rank's last heartbeat. If rank 0 publishes nothing, all of them are old."""
        age_s = now - self._published_at
        rows = enumerate(self._known)
        return {
            rank: Heartbeat(number, phase, max(silent_s, age_s)) for rank, (number, phase, silent_s) in rows
        }

    def restart(self, now: float) -> None:
        """Let all ranks be alive at `now`: this process was suspended, so what it knows is old."""
        self._seen.update({rank: (text, now) for rank, (text, _) in self._seen.items()})
        self._published_at = now

    def _note(self, rank: int, text: str, now: float) -> None:
        if text and text != self._seen[rank][0]:
            self._seen[rank] = (text, now)

    def _is_sender(self, now: float) -> bool:
        before = [rank for rank in self._here if rank < self._rank]
        return all(now - self._seen[rank][1] > _TAKEOVER * self._beat_s for rank in before)

    def _is_there(self, key: str) -> bool:
        """Return whether a key is in the store; reading another one would wait for it."""
        if key not in self._present and self._store.check([key]):
            self._present.add(key)
        return key in self._present

    def _read_machines(self, now: float) -> None:
        keys = [key for ranks in self._others if self._is_there(key := f"beat/{ranks[0]}")]
        for value in self._store.multi_get(keys) if keys else ():
            for rank, text in json.loads(value).items():
                self._note(int(rank), text, now)

    def _publish(self, now: float) -> None:
        rows = []
        for text, arrived in self._seen.values():
            number, phase, _ = json.loads(text)
            rows.append(json.dumps([number, phase, round(now - arrived, 1)]))
        rows.append(str(self._count))
        for index, text in enumerate(rows, self._size):
            self._texts[index] = text
        if self._others:
            self._store.set("beats", json.dumps(rows))

    def _learn(self, now: float) -> None:
        version = self._texts[2 * self._size]
        if version != self._version:
            rows = ",".join(self._texts[index] for index in range(self._size, 2 * self._size))
            self._known = json.loads(f"[{rows}]")
            self._version = version
            self._published_at = now
