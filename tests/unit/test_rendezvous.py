import pytest

from cluster import rendezvous
from cluster.backends import BACKENDS
from cluster.model import Job, NodeStatus
from cluster.rendezvous import failing, fold, judge, missing

PLAN = BACKENDS["local"].plan(Job("job", ("x.py",), 2, 2, "/runs"), attempt=1, port=20000)
FOREIGN = BACKENDS["local"].plan(Job("job", ("x.py",), 2, 2, "/runs", says_ready=False), attempt=1, port=20000)


def running(*phases):
    return [NodeStatus(f"node-{rank}", phase) for rank, phase in enumerate(phases or ("starting", "starting"))]


def joining(node, time, *, reachable, listening=False, why=""):
    seen = {"reachable": reachable, "listening": listening, "why": why}
    return {"event": "joining", "node": node, "time": time, "master": "m:1", **seen}


def ready(node, time):
    return {"event": "ready", "node": node, "time": time, "world_size": 4, "backend": "gloo", "device": "cpu"}


def test_nodes_have_met_when_each_has_said_so():
    view = rendezvous.start(PLAN, 100.0)
    view = fold(view, running(), [ready(0, 103.0)], 104.0)
    assert judge(view, 104.0, 60) == "waiting"
    view = fold(view, running(), [ready(1, 105.0)], 106.0)
    assert judge(view, 106.0, 60) == "met"
    assert view.met_after_s == 5.0


def test_a_reachable_master_is_enough_only_for_a_program_without_events():
    events = [joining(rank, 101.0, reachable=True) for rank in (0, 1)]
    assert judge(fold(rendezvous.start(PLAN, 100.0), running(), events, 102.0), 102.0, 60) == "waiting"
    assert judge(fold(rendezvous.start(FOREIGN, 100.0), running(), events, 102.0), 102.0, 60) == "met"


def test_a_node_that_cannot_reach_the_master_says_why_and_is_missing_when_time_is_up():
    view = rendezvous.start(PLAN, 100.0)
    view = fold(view, running(), [ready(0, 101.0), joining(1, 102.0, reachable=False, why="No route to host")], 103.0)
    (late,) = missing(view)
    assert (late.name, late.phase, late.note) == ("node-1", "joining", "cannot reach m:1: No route to host")
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


def test_a_master_that_does_not_listen_is_reported_but_its_nodes_have_not_reached_it():
    events = [joining(0, 101.0, reachable=True, listening=True), joining(1, 121.0, reachable=True, why="refused")]
    view = fold(rendezvous.start(PLAN, 100.0), running(), events, 122.0)
    assert [(node.reached, node.note) for node in view.nodes] == [
        (True, "reached m:1"),
        (False, "m:1 does not listen yet: refused"),
    ]
    assert [node.name for node in missing(view)] == ["node-1"]


def failure(rank, time, error="boom", *, secondary=False):
    return {"rank": rank, "time": time, "error": error, "exit_code": 1, "secondary": secondary}


def first_of(*failures):
    """The first failing node of two which ended at 8.5 and 9.5 with these failures."""
    ends = [NodeStatus(f"node-{k}", "exited", 1, ended_at=8.5 + k, failure=found) for k, found in enumerate(failures)]
    return failing(fold(rendezvous.start(FOREIGN, 0.0), ends, [], 10.0))[0].name


def test_the_time_of_a_failure_counts_and_not_that_of_the_nodes_end():
    assert first_of(failure(0, 8.4), failure(2, 8.0)) == "node-1"


def test_a_node_whose_ranks_only_lost_their_peers_comes_last():
    assert first_of(failure(0, 8.0, "Connection closed by peer", secondary=True), failure(2, 8.4)) == "node-1"
    assert first_of(failure(0, 8.0, "Connection closed by peer", secondary=True), None) == "node-1"


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
