import fcntl
import threading
from pathlib import Path

import pytest

from cluster.agent.app.node_agent.events import Ready
from cluster.backends import BACKENDS, log_files, logs
from cluster.spec.model import Job


def test_lines_come_once_and_whole_however_the_bytes_are_cut(tmp_path):
    plan = BACKENDS["local"].plan(Job("job", ("x.py",), 1, 1, str(tmp_path)), attempt=1, port=20000)
    reader = log_files.Reader(plan)
    assert reader.lines() == []  # no log yet
    Path(plan.attempt_dir).mkdir(parents=True)
    seen = []
    with Path(plan.attempt_dir, "node-0.log").open("ab", buffering=0) as log:
        for byte in "eins\nzwölf\ndrei\n".encode():
            log.write(bytes([byte]))
            seen += reader.lines()
    assert seen == [("node-0", "eins"), ("node-0", "zwölf"), ("node-0", "drei")]


def test_an_event_is_found_behind_a_ranks_prefix():
    assert logs.event('[1] ::cluster {"event":"ready","node":1}') == Ready("ready", 1)


@pytest.mark.parametrize(
    "line",
    [
        "epoch 3",
        "::cluster {broken",
        "::cluster [1]",
        '::cluster {"event":["ready"]}',
    ],
)
def test_text_and_broken_events_are_text(line):
    assert logs.event(line) is None


def test_of_two_that_copy_a_piece_of_a_log_the_later_adds_what_is_missing(tmp_path):
    plan = BACKENDS["local"].plan(Job("job", ("x.py",), 1, 1, str(tmp_path)), attempt=1, port=20000)
    Path(plan.attempt_dir).mkdir(parents=True)
    copy = Path(plan.attempt_dir, "a.log")
    copy.write_bytes(b"first ")
    other = threading.Thread(target=log_files.append, args=(plan, copy, 6, b"second third"))
    with copy.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other.start()
        other.join(0.3)  # it has opened the file and waits
        file.write(b"second")
    other.join()
    assert copy.read_bytes() == b"first second third"
