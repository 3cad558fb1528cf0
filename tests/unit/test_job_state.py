from dataclasses import replace

import pytest

from cluster.agent.app.node_agent.events import event
from cluster.backends import BACKENDS
from cluster.spec.model import Job
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import Failure
from cluster.supervisor import job_state, report
from cluster.supervisor.job_state import failing, fold, judge, missing

PLAN = BACKENDS["local"].plan(Job("job", ("x.py",), 2, 2, "/runs"), attempt=1, port=20000)
FOREIGN = BACKENDS["local"].plan(
    Job("job", ("x.py",), 2, 2, "/runs", says_ready=False), attempt=1, port=20000
)


def running(*phases):
    return [
        NodeStatus(f"node-{rank}", phase) for rank, phase in enumerate(phases or ("starting", "starting"))
    ]


def joining(node, time, *, reachable, listening=False, why=""):
    seen = {"reachable": reachable, "listening": listening, "why": why}
    return event({"event": "joining", "node": node, "time": time, "master": "m:1", **seen})


def ready(node, time):
    fields = {"node": node, "time": time, "world_size": 4, "backend": "gloo", "device": "cpu"}
    return event({"event": "ready", **fields})


def test_all_nodes_have_joined_when_each_is_ready():
    view = job_state.start(PLAN, 100.0)
    view = fold(view, running(), [ready(0, 103.0)], 104.0)
    assert judge(view, 104.0, 60) == "waiting"
    view = fold(view, running(), [ready(1, 105.0)], 106.0)
    assert judge(view, 5000.0, 60) == "joined"
    assert view.joined_after_s == 5.0


def silent(view, now, patience_s=job_state.RETURN_S, events=()):
    """Fold a poll in which node-1's machine has not answered for longer than the monitor waits."""
    statuses = [
        NodeStatus("node-0", "starting"),
        NodeStatus("node-1", "lost", silent="has not answered for 9 s"),
    ]
    return fold(view, statuses, events, now, patience_s)


@pytest.fixture
def joined():
    return fold(job_state.start(PLAN, 100.0), running(), [ready(0, 101.0), ready(1, 101.0)], 101.0)


def test_a_machine_that_does_not_answer_may_return(joined):
    for now in (200.0, 259.0):
        assert judge(silent(joined, now), now, 60) == "joined"
        assert joined.nodes[1].status.silent
    view = fold(joined, running(), [], 260.0)
    assert (judge(view, 260.0, 60), view.nodes[1].status.silent) == ("joined", "")
    silent(view, 300.0)
    assert judge(silent(view, 361.0), 361.0, 60) == "failed"
    assert [node.name for node in failing(view)] == ["node-1"]
    view = fold(view, running(), [], 362.0)  # `serve` keeps polling
    assert (judge(view, 362.0, 60), view.nodes[1].phase) == ("joined", "ready")


def test_a_machine_that_others_can_replace_is_lost_at_once(joined):
    silent(joined, 200.0)
    assert judge(silent(joined, 200.4, patience_s=0.0), 200.4, 60) == "failed"


def test_a_job_that_makes_steps_runs_on_the_machine_that_does_not_answer(joined):
    progress = event({"event": "progress", "node": 0, "time": 100.0, "epoch": 1, "step": 1})
    for now in (200.0, 203.0, 206.0, 300.0):
        assert judge(silent(joined, now, patience_s=0.0, events=[progress]), now, 60) == "joined"
    assert judge(silent(joined, 305.0, patience_s=0.0), 305.0, 60) == "failed"


def test_a_job_is_neither_late_nor_stalled_while_a_machine_does_not_answer(joined):
    progress = event({"event": "progress", "node": 0, "time": 102.0, "epoch": 1, "step": 1})
    view = silent(fold(joined, running(), [progress], 102.0), 150.0)
    assert judge(view, 150.0, 60, stall_timeout_s=10) == "joined"
    assert judge(fold(view, running(), [], 150.0), 150.0, 60, stall_timeout_s=10) == "stalled"
    assert judge(silent(job_state.start(PLAN, 100.0), 170.0), 170.0, 60) == "waiting"


def test_a_reachable_master_is_enough_only_for_a_program_without_events():
    events = [joining(rank, 101.0, reachable=True) for rank in (0, 1)]
    assert judge(fold(job_state.start(PLAN, 100.0), running(), events, 102.0), 102.0, 60) == "waiting"
    assert judge(fold(job_state.start(FOREIGN, 100.0), running(), events, 102.0), 102.0, 60) == "joined"


def test_a_node_that_cannot_reach_the_master_is_missing_with_the_reason():
    view = job_state.start(PLAN, 100.0)
    view = fold(
        view, running(), [ready(0, 101.0), joining(1, 102.0, reachable=False, why="No route to host")], 103.0
    )
    (late,) = missing(view)
    assert (late.name, late.phase, late.note) == ("node-1", "joining", "cannot reach m:1: No route to host")
    assert judge(view, 159.0, 60) == "waiting"
    assert judge(view, 161.0, 60) == "late"


def test_a_node_has_not_reached_a_master_that_does_not_listen():
    events = [
        joining(0, 101.0, reachable=True, listening=True),
        joining(1, 121.0, reachable=True, why="refused"),
    ]
    view = fold(job_state.start(PLAN, 100.0), running(), events, 122.0)
    assert [(node.reached, node.note) for node in view.nodes] == [
        (True, "reached m:1"),
        (False, "m:1 does not listen yet: refused"),
    ]
    assert [node.name for node in missing(view)] == ["node-1"]


def failure(rank, time, error="boom", *, secondary=False):
    return Failure(error, rank, time=time, exit_code=1, secondary=secondary)


def ended(rank, at, found=None):
    return NodeStatus(f"node-{rank}", "exited", 1, ended_at=at, failure=found)


SECONDARY = failure(0, 8.0, "Connection closed by peer", secondary=True)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([ended(0, 9.4), ended(1, 9.1)], id="the earlier exit"),
        pytest.param(
            [ended(0, 8.5, failure(0, 8.4)), ended(1, 9.5, failure(2, 8.0))], id="the earlier failure"
        ),
        pytest.param([ended(0, 8.5, SECONDARY), ended(1, 9.5, failure(2, 8.4))], id="before its consequence"),
        pytest.param([ended(0, 8.5, SECONDARY), ended(1, 9.5)], id="an exit before its consequence"),
        pytest.param([ended(0, 8.5), NodeStatus("node-1", "lost")], id="a lost node"),
        pytest.param(
            [NodeStatus("node-0", "starting"), NodeStatus("node-1", "lost")], id="while the others run"
        ),
    ],
)
def test_the_first_failure_is_named(ends):
    view = fold(job_state.start(PLAN, 0.0), ends, [], 10.0)
    assert judge(view, 10.0, 60) == "failed"
    assert failing(view)[0].name == "node-1"


KNOWN = {"exit_code": 3, "ended_at": 50.0, "failure": Failure("x", 0), "where": "on n1", "is_final": True}
KNOWN |= {"is_cancelled": True, "lost": "2 lines: full"}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_an_ended_node_stays_when_a_later_poll_knows_less(name):
    """As after a queue has forgotten the job."""
    first = NodeStatus("node-0", "ready")
    ended = NodeStatus("node-1", "exited")
    view = fold(job_state.start(PLAN, 0.0), [first, replace(ended, **{name: KNOWN[name]})], [], 60.0)
    view = fold(view, [first, ended], [], 61.0)
    assert getattr(view.nodes[1].status, name) == KNOWN[name]


def test_a_job_is_done_when_all_nodes_exited_with_0():
    view = job_state.start(PLAN, 0.0)
    view = fold(view, [NodeStatus("node-0", "exited", 0, ended_at=1.0), *running()[1:]], [], 2.0)
    assert judge(view, 2.0, 60) == "waiting"
    view = fold(view, [NodeStatus(f"node-{rank}", "exited", 0, ended_at=1.0) for rank in (0, 1)], [], 3.0)
    assert judge(view, 3.0, 60) == "done"


def leaving(view, now, *ranks, events=()):
    """Fold a poll in which node-0 has exited, and the program of these ranks of node-1 has ended."""
    ended = NodeStatus("node-0", "exited", 0, ended_at=now)
    return fold(view, [ended, NodeStatus("node-1", "starting", leaving=ranks)], events, now)


def test_a_job_is_done_when_the_programs_of_all_ranks_have_ended_for_the_grace(joined):
    view = leaving(joined, 200.0, 3)
    assert judge(view, 229.0, 60, stall_timeout_s=5.0, grace_s=30.0) == "joined"
    assert judge(leaving(view, 231.0), 231.0, 60, grace_s=30.0) == "joined"  # a rank works again
    view = leaving(view, 240.0, 2, 3)
    assert judge(view, 249.0, 60, grace_s=0.0) == "joined"  # ten seconds at least
    assert judge(view, 271.0, 60, grace_s=30.0) == "done"
    (node,) = job_state.overdue(view, 271.0, 30.0)
    assert report.overdue(node) == "node-1: ranks 2, 3 did not exit after the program's end: stopping them"


def test_a_job_is_done_when_rank_0_has_said_so_for_the_grace_and_nothing_more(joined):
    done, step = (event({"event": kind, "node": 0, "time": 200.0}) for kind in ("done", "progress"))
    view = leaving(joined, 200.0, events=[replace(done, node=1)])
    assert judge(view, 300.0, 60, grace_s=30.0) == "joined"  # another rank has said so
    view = leaving(joined, 300.0, events=[done])
    assert judge(view, 329.0, 60, grace_s=30.0) == "joined"
    assert judge(view, 331.0, 60, grace_s=30.0) == "done"
    assert "its ranks did not exit after the job was done" in report.overdue(
        job_state.overdue(view, 331.0, 30.0)[0]
    )
    view = leaving(view, 331.0, events=[step])
    assert judge(view, 400.0, 60, grace_s=30.0) == "joined"  # the program trains again


@pytest.mark.parametrize(
    "found", [{"event": "new"}, {"event": "ready", "node": 7}, {"event": "ready", "node": "x"}]
)
def test_malformed_events_change_nothing(found):
    each = ([event(found)], [])
    views = [fold(job_state.start(PLAN, 0.0), running("pending", "pending"), events, 1.0) for events in each]
    assert views[0].nodes == views[1].nodes


def test_the_rendezvous_timeout_excludes_the_queue():
    view = job_state.start(PLAN, 100.0)
    waiting = [NodeStatus(node.name, "pending", detail="in the queue: for free nodes") for node in PLAN.nodes]
    view = fold(view, waiting, [], 5000.0)
    assert judge(view, 5001.0, 60) == "waiting"
    assert view.nodes[0].note == "in the queue: for free nodes"
    view = fold(view, running(), [], 5010.0)
    assert judge(view, 5059.0, 60) == "waiting"
    assert judge(view, 5061.0, 60) == "late"


def test_a_node_that_starts_over_is_pending_again():
    """An attempt that gave its machines back: without the mark, pending is an old answer of squeue."""
    joined = [NodeStatus("node-0", "ready"), NodeStatus("node-1", "pending", detail="no machine is free")]
    view = fold(job_state.start(PLAN, 0.0), joined, [joining(0, 1.0, reachable=True)], 1.0)
    waiting = [NodeStatus(node.name, "pending", detail="tries again in 5 s") for node in PLAN.nodes]
    assert [node.phase for node in fold(view, waiting, [], 2.0).nodes] == ["ready", "pending"]
    view = fold(view, [replace(status, starts_over=True) for status in waiting], [], 3.0)
    assert [(node.phase, node.note, node.reached) for node in view.nodes] == [
        ("pending", "tries again in 5 s", False)
    ] * 2
    assert view.nodes[0].since == 3.0


def test_the_rendezvous_timeout_starts_after_the_last_setup():
    view = job_state.start(PLAN, 100.0)
    events = [event({"event": "setup", "node": node, "time": 101.0}) for node in (0, 1)]
    view = fold(view, running(), events, 101.0)
    assert [node.phase for node in view.nodes] == ["setup", "setup"]
    view = fold(view, running(), [joining(0, 500.0, reachable=True)], 500.0)
    assert judge(view, 500.0, 60) == "waiting"
    view = fold(view, running(), [joining(1, 600.0, reachable=True)], 600.0)
    assert judge(view, 559.0, 60) == "waiting"
    assert judge(view, 561.0, 60) == "late"


def test_a_queue_that_has_not_heard_of_the_start_does_not_describe_a_ready_node():
    """squeue's answer may be some seconds older than the agent's."""
    view = job_state.start(PLAN, 0.0)
    waits = [NodeStatus(node.name, "pending", detail="in the queue: Resources") for node in PLAN.nodes]
    view = job_state.fold(view, waits, [], 1.0)
    assert (job_state.is_queued(view), job_state.waits_for(view)) == (True, "in the queue: Resources")
    view = job_state.fold(view, waits, [ready(rank, 2.0) for rank in range(len(PLAN.nodes))], 2.0)
    assert view.ready_count == len(PLAN.nodes)
    assert not any("queue" in node.note for node in view.nodes)
    assert not job_state.is_queued(view)
