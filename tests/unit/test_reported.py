"""Events and status files of nodes: which values fit, and that no other one reaches a command."""

import json

import pytest

from cluster.agent.app.node_agent import events
from cluster.agent.app.node_agent.events import Event, Joining, Metric, Progress
from cluster.spec import status
from cluster.spec.status import AgentStatus, Failure, HostMemory, RankUsage, StalledRank, Usage

HUGE = "9" * 400


def event(text):
    return events.event(events.load(text))


def test_a_well_formed_event_is_read_and_written_as_it_was():
    progress = {"event": "progress", "node": 1, "time": 5.5, "epoch": 1, "epochs": 3, "step": 7, "steps": 63}
    progress |= {"loss": 1.5, "images_per_s": 214, "eta_s": 6.25}
    metric = {"event": "metric", "node": 0, "time": 5.5, "epoch": 1, "epochs": 3, "slowest_rank": 2}
    metric |= {"shares": {"data": 0.25}, "map50": 0.5, "box_loss": None, "images_per_s": 200.0, "seconds": 3}
    done = {"event": "done", "node": 0, "time": 9.0, "best": "/runs/job/best.pt", "map": 0.25}
    for fields in (progress, metric, done):
        assert event(json.dumps(fields)).as_json() == fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("time", value) for value in (HUGE, "-1", "1e300", "NaN", '"now"', "true")],
        *[("eta_s", value) for value in ("Infinity", "-Infinity", "NaN", "1e400", "-1", HUGE, "[]")],
        *[("epoch", value) for value in ('"1 of 3"', "1.5", "-1", "1e30", HUGE, "true", "{}")],
        *[("steps", value) for value in ("Infinity", '""')],
        *[("loss", value) for value in ("1e40", '"low"')],
        ("node", '"x"'),
    ],
)
def test_a_value_that_does_not_fit_is_dropped_and_named_and_the_others_stay(field, value):
    found = event(f'{{"event":"progress","step":7,"{field}":{value}}}')
    assert found == Progress("progress", step=7)
    assert found.misfits == (field,)


def test_a_value_that_is_null_is_missing_and_a_whole_number_counts():
    found = event('{"event":"progress","epoch":3.0,"loss":null,"eta_s":0}')
    assert (found, found.misfits) == (Progress("progress", epoch=3, eta_s=0), ())


def test_scores_that_do_not_fit_are_dropped():
    more = f'"map50":{HUGE},"map":NaN,"box_loss":1e5,"name":"x","ok":true,"list":[1],"{"n" * 65}":1'
    found = event(f'{{"event":"metric","epoch":"last",{more}}}')
    assert found == Metric("metric", scores={"box_loss": 1e5})
    assert set(found.misfits) == {"epoch", "map50", "map"}
    many = {"event": "metric", **{f"m{number}": number for number in range(1000)}}
    assert len(event(json.dumps(many)).scores) == events.MOST_SCORES


def test_texts_are_valid_lines_of_a_bounded_length():
    found = event(
        json.dumps({"event": "joining", "why": "a\x1b]52;c;eA==\x07b\u2028c\n\ud800" + "x" * 10_000})
    )
    assert isinstance(found, Joining)
    assert found.why.startswith("a ]52;c;eA== b c ?xxx")
    assert len(found.why) <= events.MOST_TEXT
    assert found.why.encode()


@pytest.mark.parametrize(
    "text", ["[1]", "3", '{"event":1}', "{", f"{HUGE * 20}", "[" * 100_000, '{"node":0}']
)
def test_what_is_no_event_is_text(text):
    assert event(text) is None


def test_an_unknown_kind_is_an_event_without_a_meaning():
    found = event(f'{{"event":"{"new" * 100}","node":1,"more":{HUGE}}}')
    assert (type(found), found.node, len(found.kind)) == (Event, 1, events.MOST_NAME)


FULL = {
    "phase": "running",
    "heartbeat": 5.5,
    "events": {"ready": {"event": "ready", "node": 0}},
    "usage": {
        "ranks": [{"gpu": "0", "use": 5, "memory": 1, "memory_total": 2, "temperature": None, "rank": 0}],
        "host": {"free": 1, "total": 2},
    },
    "stall": [{"rank": 1, "collective": "all_reduce", "call": "all_reduce", "place": "a.py:1", "busy": True}],
    "leaving": [1, 2],
}
FULL["usage"]["ranks"][0] |= {"cpu": 0.5, "rss": 1000}


def test_a_status_is_read_and_its_usage_written_as_it_was():
    found = status.parse(json.dumps(FULL))
    assert (found.phase, found.heartbeat, found.leaving, found.has_exited) == ("running", 5.5, (1, 2), False)
    assert found.events == (events.event({"event": "ready", "node": 0}),)
    assert found.stall == (StalledRank(1, "all_reduce", "all_reduce", "a.py:1", busy=True),)
    assert found.usage.as_json() == FULL["usage"]


def test_the_end_of_a_node_is_read():
    others = [{"rank": 1, "error": "lost a peer"}]
    failure = {"rank": 0, "local_rank": 0, "time": 4.0, "error": "boom", "hint": "h", "exit_code": 3}
    text = {
        "phase": "exited",
        "exit_code": 3,
        "ended_at": 5.0,
        "reason": "",
        "failure": {**failure, "others": others},
    }
    found = status.parse(json.dumps(text))
    assert found.has_exited
    assert (found.failure.error, found.failure.rank, found.failure.time) == ("boom", 0, 4.0)
    assert [(other.rank, other.error) for other in found.failure.others] == [(1, "lost a peer")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stall": [{}, {"rank": 1}, 5, {"rank": "x"}]}, AgentStatus(stall=(StalledRank(1),))),
        ({"stall": {"rank": 1}}, AgentStatus()),
        ({"phase": "exited"}, AgentStatus("exited")),
        ({"phase": "exited", "exit_code": 256}, AgentStatus("exited")),
        ({"usage": {"ranks": [{}]}}, AgentStatus(usage=Usage(()))),
        ({"usage": {"ranks": None, "host": {"free": 1, "total": 2}}}, AgentStatus()),
        ({"usage": {"ranks": [], "host": {"free": 1}}}, AgentStatus(usage=Usage(()))),
        ({"usage": {"ranks": [], "host": {"free": 1, "total": 0}}}, AgentStatus(usage=Usage(()))),
        (
            {
                "usage": {
                    "ranks": [{"rank": 0, "cpu": 1, "rss": 2, "use": "9", "gpu": 1}],
                    "host": {"free": 0, "total": 9},
                }
            },
            AgentStatus(usage=Usage((RankUsage(0, 1, 2),), HostMemory(0, 9))),
        ),
        ({"leaving": [1, "2", -1]}, AgentStatus(leaving=(1,))),
        ({"leaving": 5, "events": [1], "heartbeat": "x"}, AgentStatus(events=())),
        ({"failure": {"rank": 0}}, AgentStatus()),
        (
            {"failure": {"error": "e", "time": "x", "others": [{}]}},
            AgentStatus(failure=Failure("e", others=())),
        ),
    ],
)
def test_what_does_not_fit_a_status_is_dropped(fields, expected):
    assert status.parse(json.dumps(fields)) == expected


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", '{"phase":' + "[" * 100_000, f'"{"x" * (2 << 20)}"'])
def test_a_malformed_status_is_empty(text):
    assert status.parse(text) == AgentStatus()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("3 1764175000.123456789", (3, 1764175000.123456789)),
        ("0", (0, None)),
        ("x y", (1, None)),
        ("", (1, None)),
        (f"{HUGE} inf", (1, None)),
        ("-1 1e300", (1, None)),
    ],
)
def test_an_exit_file_without_a_code_counts_as_a_failure(line, expected):
    assert status.from_exit_file(line) == expected
