from dataclasses import replace

import pytest

from cluster import rendezvous
from cluster.backends import BACKENDS
from cluster.model import Job, NodeStatus
from cluster.rendezvous import failing, fold, judge, missing

PLAN = BACKENDS["local"].plan(Job("job", ("x.py",), 2, 2, "/runs"), attempt=1, port=20000)
FOREIGN = BACKENDS["local"].plan(Job("job", ("x.py",), 2, 2, "/runs", says_ready=False), attempt=1, port=20000)


def running(*phases):
    return [NodeStatus(f"node-{rank}", phase) for rank, phase in enumerate(phases or ("starting", "starting"))]


def joining(node, time, *, reachable, why=""):
    return {"event": "joining", "node": node, "time": time, "master": "m:1", "reachable": reachable, "why": why}


def ready(node, time):
    return {"event": "ready", "node": node, "time": time, "world_size": 4, "backend": "gloo", "device": "cpu"}


def test_nodes_have_met_when_each_has_said_so():
    view = rendezvous.start(PLAN, 100.0)
    view = fold(view, running(), [ready(0, 103.0)], 104.0)
    assert judge(view, 104.0, 60) == "waiting"
    view = fold(view, running(), [ready(1, 105.0)], 106.0)
    assert judge(view, 106.0, 60) == "met"
    assert view.met_after_s == 5.0


def test_a_connected_port_is_enough_only_for_a_program_that_says_no_more():
    events = [joining(rank, 101.0, reachable=True) for rank in (0, 1)]
    assert judge(fold(rendezvous.start(PLAN, 100.0), running(), events, 102.0), 102.0, 60) == "waiting"
    assert judge(fold(rendezvous.start(FOREIGN, 100.0), running(), events, 102.0), 102.0, 60) == "met"


def test_a_node_that_cannot_reach_the_master_says_why_and_is_missing_when_time_is_up():
    view = rendezvous.start(PLAN, 100.0)
    view = fold(view, running(), [ready(0, 101.0), joining(1, 102.0, reachable=False, why="Connection refused")], 103.0)
    (late,) = missing(view)
    assert (late.name, late.phase, late.note) == ("node-1", "joining", "cannot reach m:1: Connection refused")
    assert judge(view, 159.0, 60) == "waiting"
    assert judge(view, 161.0, 60) == "late"


def test_training_longer_than_the_rendezvous_timeout_is_not_late():
    view = fold(rendezvous.start(PLAN, 0.0), running(), [ready(0, 1.0), ready(1, 1.0)], 2.0)
    assert judge(view, 5000.0, 60) == "met"


def test_the_first_failure_is_named_whatever_order_it_was_seen_in():
    view = fold(rendezvous.start(PLAN, 0.0), running(), [ready(0, 1.0), ready(1, 1.0)], 2.0)
    ends = [NodeStatus("node-0", "exited", 1, ended_at=9.4), NodeStatus("node-1", "exited", 137, ended_at=9.1)]
    view = fold(view, ends, [], 10.0)
    assert judge(view, 10.0, 60) == "failed"
    assert [node.name for node in failing(view)] == ["node-1", "node-0"]


def test_a_failed_event_is_earlier_than_the_exit_that_follows_it():
    error = {"event": "failed", "node": 1, "rank": 2, "time": 8.0, "error": "boom"}
    ends = [NodeStatus("node-0", "exited", 1, ended_at=8.5), NodeStatus("node-1", "exited", 1, ended_at=9.5)]
    view = fold(rendezvous.start(PLAN, 0.0), ends, [error], 10.0)
    assert [node.name for node in failing(view)] == ["node-1", "node-0"]


def first_of(ends, *events, plan=FOREIGN, **words):
    return failing(fold(rendezvous.start(plan, 0.0), ends, events, 10.0, **words))[0]


@pytest.mark.parametrize("where", ["", "on n7"])
def test_a_program_without_events_that_only_noticed_comes_last_unless_a_rank_of_it_was_killed(where):
    end = NodeStatus("node-0", "exited", 1, ended_at=8.5, where=where)
    later = NodeStatus("node-1", "exited", 1, ended_at=9.5, where=where)
    assert first_of([end, later], only_noticed=["node-0"]).name == "node-1"
    # how torch itself ends now and then where a rank is lost
    assert first_of([end, later], only_noticed=["node-0"], signals={"node-0": "SIGABRT"}).name == "node-1"
    found = first_of([end, later], only_noticed=["node-0"], signals={"node-0": "SIGSEGV"})
    assert (found.name, found.note) == ("node-0", "a rank was ended by SIGSEGV" + (f"; {where}" if where else ""))
    full = replace(end, detail="No space left on device")
    assert first_of([full, later], only_noticed=["node-0"]).name == "node-0"


def test_a_rank_beside_a_killed_one_only_noticed_it():
    ends = [NodeStatus("node-0", "exited", 1, ended_at=8.5), NodeStatus("node-1", "exited", 1, ended_at=9.5)]
    lost = [
        {"event": "failed", "node": k, "time": 8.0 + k, "error": "another rank ended", "echo": True} for k in (0, 1)
    ]
    found = first_of(ends, *lost, plan=PLAN, signals={"node-1": "SIGKILL"})
    assert (found.name, found.note, found.failed) == ("node-1", "a rank was ended by SIGKILL", None)


@pytest.mark.parametrize("order", [1, -1])
def test_of_a_nodes_ranks_the_one_that_failed_by_itself_counts(order):
    ends = [NodeStatus("node-0", "exited", 1, ended_at=8.5), NodeStatus("node-1", "exited", 1, ended_at=9.5)]
    lost, raised = (
        {"event": "failed", "node": 0, "time": 8.0, "error": e, "echo": e == "lost"} for e in ("lost", "own")
    )
    assert first_of(ends, *[lost, raised][::order], plan=PLAN).failed["error"] == "own"


def test_a_signal_is_told_of_a_node_that_torchrun_ended_with_1_and_of_no_other():
    ends = [NodeStatus("node-0", "exited", 0), NodeStatus("node-1", "exited", 1, "No space left on device")]
    view = fold(rendezvous.start(PLAN, 0.0), ends, [], 10.0, signals={"node-0": "SIGKILL", "node-1": "SIGKILL"})
    assert [node.note for node in view.nodes] == [
        "exit 0",
        "No space left on device; a rank was ended by SIGKILL",
    ]


def test_a_lost_node_fails_the_job_though_the_others_run():
    view = fold(rendezvous.start(PLAN, 0.0), running("starting", "lost"), [], 1.0)
    assert judge(view, 1.0, 60) == "failed"
    assert failing(view)[0].name == "node-1"


def test_all_exited_well_is_done_and_one_is_not():
    view = rendezvous.start(PLAN, 0.0)
    view = fold(view, [NodeStatus("node-0", "exited", 0, ended_at=1.0), *running()[1:]], [], 2.0)
    assert judge(view, 2.0, 60) == "waiting"
    view = fold(view, [NodeStatus(f"node-{rank}", "exited", 0, ended_at=1.0) for rank in (0, 1)], [], 3.0)
    assert judge(view, 3.0, 60) == "done"


@pytest.mark.parametrize("event", [{"event": "new"}, {"event": "ready", "node": 7}, {"event": "ready", "node": "x"}])
def test_events_that_make_no_sense_change_nothing(event):
    view = rendezvous.start(PLAN, 0.0)
    assert fold(view, running("pending", "pending"), [event], 1.0).nodes == view.nodes


def test_time_in_a_queue_is_not_time_that_a_node_is_late():
    view = rendezvous.start(PLAN, 100.0)
    waiting = [NodeStatus(node.name, "pending", detail="in the queue: for free nodes") for node in PLAN.nodes]
    view = fold(view, waiting, [], 5000.0)
    assert judge(view, 5001.0, 60) == "waiting"
    assert view.nodes[0].note == "in the queue: for free nodes"
    view = fold(view, running(), [], 5010.0)
    assert judge(view, 5059.0, 60) == "waiting"
    assert judge(view, 5061.0, 60) == "late"
