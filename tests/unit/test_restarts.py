"""Whether and where a failed job starts again, from what was seen of it."""

from dataclasses import replace

import pytest

from cluster import rendezvous, restarts
from cluster.backends import BACKENDS
from cluster.errors import UnreachableError
from cluster.model import Job, Node, NodeStatus
from cluster.report import cause

HOSTS = tuple(Node(name, f"10.0.0.{index}", login=name, run_dir="/r") for index, name in enumerate(("a", "b")))
SPARES = tuple(Node(name, f"10.0.1.{index}", login=name, run_dir="/r") for index, name in enumerate(("c", "d")))
JOB = Job("job", ("-m", "trainer"), 2, 1, "/runs", hosts=HOSTS, spares=SPARES, max_restarts=2)
PLAN = BACKENDS["ssh"].plan(JOB, attempt=1, port=20000)


def seen(*events, a=None, b=None):
    statuses = [a or NodeStatus("a", "starting"), b or NodeStatus("b", "starting")]
    return rendezvous.fold(rendezvous.start(PLAN, 100.0), statuses, events, 110.0)


def failed(name, error, code=1, *, secondary=False):
    failure = {"rank": 1, "time": 105.0, "error": error, "exit_code": code, "secondary": secondary}
    return NodeStatus(name, "exited", code, failure=failure if code != 75 else None)


def progress(step):
    return {"event": "progress", "node": 0, "time": 104.0, "epoch": 2, "step": step}


def refusal(view, *past):
    last = restarts.failure(view, "failed")
    return restarts.refusal(JOB, view, "failed", [*past, last])


def test_a_lost_node_or_a_checkpointed_exit_is_a_reason_to_start_again():
    assert refusal(seen(b=NodeStatus("b", "lost", detail="gone"))) == ""
    assert refusal(seen(b=failed("b", "", 75))) == ""
    assert refusal(seen(b=failed("b", "ValueError: x"))) == ""


def test_the_same_error_at_the_same_step_twice_is_the_programs_own():
    view = seen(progress(7), b=failed("b", "ValueError: x"))
    first = restarts.failure(view, "failed")
    assert "epoch 2, step 7" in refusal(view, first)
    assert refusal(seen(progress(8), b=failed("b", "ValueError: x")), first) == ""
    assert refusal(seen(progress(7), b=failed("b", "KeyError: y")), first) == ""


def test_a_container_that_never_starts_is_not_tried_for_ever():
    view = seen(b=NodeStatus("b", "exited", 125, "no such device"))
    assert "before its first step" in refusal(view, restarts.failure(view, "failed"))


def test_killed_at_the_same_step_twice_is_bad_luck_and_no_error_of_the_program():
    view = seen(progress(7), b=NodeStatus("b", "exited", 137))
    assert refusal(view, restarts.failure(view, "failed")) == ""


def test_refused_input_used_up_restarts_and_nodes_that_never_met_end_it():
    assert "refused" in refusal(seen(a=failed("a", "--batch 1", 2)))
    lost = seen(b=NodeStatus("b", "lost"))
    past = [restarts.failure(lost, "failed")] * 2
    assert "restarted 2 times" in refusal(seen(progress(1), b=NodeStatus("b", "lost")), *past)
    assert "never met" in restarts.refusal(JOB, seen(), "late", [restarts.failure(seen(), "late")])


def test_the_failure_of_which_others_are_the_consequence_is_the_cause():
    view = seen(a=failed("a", "Connection closed by peer", secondary=True), b=failed("b", "killed by SIGKILL", 137))
    assert cause(view, "failed") == "b: rank 1: killed by SIGKILL"
    assert not restarts.failure(view, "failed").by_itself


WELL = dict.fromkeys("abcd")
AWAY = UnreachableError("b: does not answer")


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (WELL, "ab"),
        (WELL | {"b": AWAY}, "ac"),
        (WELL | {"a": AWAY}, "cb"),
        (WELL | {"b": AWAY, "c": AWAY}, "ad"),
        (WELL | {"a": AWAY, "b": AWAY}, "cd"),
        (WELL | {"a": AWAY, "c": AWAY, "d": AWAY}, ""),
    ],
)
def test_spares_take_the_places_of_lost_nodes(state, names):
    assert "".join(node.name for node in restarts.choose(JOB, HOSTS, state)) == names


def test_fewer_nodes_only_where_that_was_asked_for():
    state = WELL | {"a": AWAY, "c": AWAY, "d": AWAY}
    assert [node.name for node in restarts.choose(replace(JOB, min_nodes=1), HOSTS, state)] == ["b"]


def test_a_node_that_cannot_be_seen_is_not_late():
    """`attach` long after the start, and one machine's sshd is slow to answer: who has met is not known yet."""
    dark = rendezvous.fold(seen(), [NodeStatus("a", "starting"), NodeStatus("b", "starting", silent="why")], [], 900.0)
    assert rendezvous.judge(seen(), 900.0, 300) == "late"
    assert rendezvous.judge(dark, 900.0, 300) == "waiting"


def test_a_job_that_makes_no_step_is_stalled_but_a_validation_is_not():
    view = seen(progress(3), {"event": "ready", "node": 0, "time": 103.0}, {"event": "ready", "node": 1, "time": 103.0})
    assert rendezvous.judge(view, 160.0, 300, 60) == "met"
    assert rendezvous.judge(view, 171.0, 300, 60) == "stalled"  # of a step that was heard of at 110
    assert rendezvous.judge(view, 171.0, 300, 0) == "met"
    alive = {"event": "heartbeat", "node": 0, "time": 168.0, "phase": "validation", "idle_s": 1.0}
    view = rendezvous.fold(view, [NodeStatus("a", "starting"), NodeStatus("b", "starting")], [alive], 168.0)
    assert rendezvous.judge(view, 170.0, 300, 60) == "met"


def test_a_job_is_not_stalled_while_what_it_has_done_long_ago_is_still_being_read():
    """A launcher that attaches after hours gets the log in parts, the oldest first."""
    view = seen(progress(3), {"event": "ready", "node": 0, "time": 103.0}, {"event": "ready", "node": 1, "time": 103.0})
    view = rendezvous.fold(view, [NodeStatus("a", "starting"), NodeStatus("b", "starting")], [progress(4)], 9000.0)
    assert rendezvous.judge(view, 9001.0, 300, 60) == "met"
    assert rendezvous.judge(view, 9061.0, 300, 60) == "stalled"
