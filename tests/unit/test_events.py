import contextlib
import io
import json
import math
import os
import time

from trainer import contract
from trainer.engine.events import Events

JOB = {contract.JOB_ID: "digits-1", "LOCAL_RANK": "0", "GROUP_RANK": "1"}


def written(out: io.StringIO) -> list[dict[str, object]]:
    lines = out.getvalue().splitlines()
    assert all(line.startswith("::cluster ") for line in lines)
    return [json.loads(line.removeprefix("::cluster ")) for line in lines]


def test_an_event_is_one_json_line_with_node_and_time() -> None:
    out = io.StringIO()
    Events(JOB, out).emit("ready", rank=2, world_size=4, note="two\nlines")
    (event,) = written(out)
    assert abs(float(str(event.pop("time"))) - time.time()) < 10
    assert event == {"event": "ready", "node": 1, "rank": 2, "world_size": 4, "note": "two\nlines"}


def test_only_local_rank_0_speaks_except_to_say_that_it_failed() -> None:
    out = io.StringIO()
    events = Events({**JOB, "LOCAL_RANK": "1"}, out)
    events.emit("ready")
    events.progress(step=1, steps=1)
    events.emit("failed", error="no such file")
    assert [e["event"] for e in written(out)] == ["failed"]


def test_progress_is_written_twice_a_second_and_at_the_end() -> None:
    out = io.StringIO()
    events = Events(JOB, out)
    for step in range(1, 101):
        events.progress(step=step, steps=100)
    steps = [e["step"] for e in written(out)]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) <= 4


def test_numbers_that_json_does_not_know_become_null() -> None:
    out = io.StringIO()
    Events(JOB, out).emit("metric", map50=math.nan, loss=math.inf, shares={"data": 0.123456789})
    (event,) = written(out)
    assert event["map50"] is None
    assert event["loss"] is None
    assert event["shares"] == {"data": 0.123457}


def test_an_event_without_a_reader_does_not_end_the_rank() -> None:
    """The launcher was killed; its SIGTERM follows, and the rank writes a checkpoint."""
    reader, writer = os.pipe()
    os.close(reader)
    out = os.fdopen(writer, "w")
    Events(JOB, out).emit("ready")
    with contextlib.suppress(BrokenPipeError):
        out.close()
