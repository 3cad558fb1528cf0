"""The log of the node, in which secrets are masked, and its status file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from io import FileIO

from .masking import Mask
from .settings import EVENT_MARK, Fields, Settings

#: The events of which the status has the last one. Rare ones are written at once, the others by the heartbeat.
RARE_EVENTS = ("setup", "joining", "ready", "done")
SHOWN_EVENTS = (*RARE_EVENTS, "progress", "metric")
#: A longer event is only in the log: the launcher fetches the status at every poll.
EVENT_MAX_BYTES = 1 << 14


class Log:
    """The node's log, one log per rank, and the console. A full disk does not stop the ranks."""

    def __init__(self, settings: Settings) -> None:
        self._mask = Mask(settings.secrets)
        self._lock = threading.Lock()
        self.error = ""
        self._lost_lines = 0
        #: When a rank wrote the last line.
        self.output_at: float | None = None
        folder = os.path.join(settings.folder, "ranks", settings.name)
        os.makedirs(folder, exist_ok=True)
        self._all = open(settings.path(".log"), "ab", buffering=0)
        self._ranks = [
            open(os.path.join(folder, "%d.log" % rank), "ab", buffering=0) for rank in range(settings.ranks)
        ]

    def line(self, text: bytes, local_rank: int | None = None, prefix: bytes = b"") -> None:
        """Write one line of a rank, or of the agent after a `prefix`, with secrets masked."""
        text = prefix + self._mask.line(text) + b"\n"
        shown = b"[%d] %s" % (local_rank, text) if local_rank else text
        with self._lock:
            if local_rank is not None:
                self.output_at = round(time.time(), 3)
            is_complete = local_rank is None or self._write(self._ranks[local_rank], text)
            if not (self._write(self._all, shown) and is_complete):
                self._lost_lines += 1
            if EVENT_MARK.encode() not in text:
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(shown)
                    sys.stdout.buffer.flush()

    def message(self, text: str) -> None:
        """Write a line of the agent itself."""
        self.line(text.encode(errors="replace"), prefix=b"agent: ")

    def masked(self, text: str) -> str:
        """Return the text with `***` instead of secrets."""
        return self._mask.text(text)

    def masked_event(self, event: Fields) -> Fields:
        """Return the event with its secrets replaced by `***` in its texts, but not in its kind."""
        return self._mask.event(event)

    def lost(self) -> Fields:
        """Return the fields of the status that say how many lines are not complete in the logs, and why."""
        return (
            {"lost_lines": self._lost_lines, "lost_why": self.error.rpartition(": ")[2]} if self.error else {}
        )

    def _write(self, file: FileIO, data: bytes) -> bool:
        """Write to a file; return whether all of the data was written. A disk that is almost full takes a part."""
        try:
            while data:
                data = data[file.write(data) or 0 :]
        except OSError as error:
            self.error = "{}: {}".format(file.name, error.strerror)
            return False
        return True


class Status:
    """The node's status file, which is replaced atomically."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path(".json")
        self._agent_path = settings.path(".agent")
        self._agent = ""
        self._lock = threading.RLock()
        self._events: Fields = {}
        self.written_at = 0.0
        self.fields: Fields = {"phase": "starting", "pid": os.getpid(), "started_at": round(time.time(), 3)}
        self.fields["events"] = self._events

    def record(self, event: Fields) -> None:
        """Keep the last event of each kind that the launcher shows, so that it need not read the log. Any thread."""
        kind = event.get("event")
        if kind not in SHOWN_EVENTS:
            return
        with self._lock:
            self._events[kind] = event
            if kind in RARE_EVENTS:
                self.write()

    def write(self, **fields: object) -> None:
        """Change fields and write the file."""
        with self._lock:
            self._write(fields)

    def _write(self, fields: Fields) -> None:
        self.fields.update(fields, heartbeat=round(time.time(), 3))
        self.written_at = time.monotonic()
        replace_file(self._path, json.dumps(self.fields, separators=(",", ":")) + "\n")
        agent = "{pid} {phase}\n".format(**self.fields)
        if agent != self._agent:
            self._agent = agent
            replace_file(self._agent_path, agent)


def replace_file(path: str, text: str) -> None:
    """Replace a small file atomically. An error is ignored: a node runs on without its status.

    It is not synced to the disk: a status is renewed every 2 s, and does not outlive the machine's ranks.
    """
    partial = path + ".tmp"
    try:
        with open(partial, "w") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError:  # a full disk has no space for another file, but the old one can be overwritten
        with contextlib.suppress(OSError):
            os.remove(partial)
        with contextlib.suppress(OSError), open(path, "r+") as file:
            file.write(text)
            file.truncate()
