"""Restart policy, on views of failed attempts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.agent.app.node_agent.events import event
from cluster.backends import BACKENDS
from cluster.backends.batch import queued
from cluster.errors import UnreachableError
from cluster.spec.model import Job, Machine, Queue
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import Failure
from cluster.supervisor import job_state, restarts

ROOT = Path(__file__).parents[2]
HOSTS = tuple(
    Machine(name, f"10.0.0.{index}", login=name, run_dir="/r") for index, name in enumerate(("a", "b"))
)
SPARES = tuple(
    Machine(name, f"10.0.1.{index}", login=name, run_dir="/r") for index, name in enumerate(("c", "d"))
)
JOB = Job("job", ("-m", "trainer"), 2, 1, "/runs", hosts=HOSTS, spares=SPARES, max_restarts=2)
PLAN = BACKENDS["ssh"].plan(JOB, attempt=1, port=20000)


def seen(*events, a=None, b=None):
    statuses = [a or NodeStatus("a", "starting"), b or NodeStatus("b", "starting")]
    return job_state.fold(job_state.start(PLAN, 100.0), statuses, events, 110.0)


def failed(name, error, code=1, *, secondary=False):
    failure = Failure(error, 1, time=105.0, exit_code=code, secondary=secondary)
    return NodeStatus(name, "exited", code, failure=failure if code != 75 else None)


def progress(step):
    return event({"event": "progress", "node": 0, "time": 104.0, "epoch": 2, "step": step})


def ready(node):
    return event({"event": "ready", "node": node, "time": 103.0})


def refusal(view, *past):
    last = restarts.failure(view, "failed")
    return restarts.refusal(JOB, view, "failed", [*past, last])


def test_a_lost_node_and_exit_75_are_restarted():
    assert refusal(seen(b=NodeStatus("b", "lost", detail="gone"))) == ""
    assert refusal(seen(b=failed("b", "", 75))) == ""
    assert refusal(seen(b=failed("b", "ValueError: x"))) == ""


def test_the_same_error_at_the_same_step_twice_is_not_restarted():
    view = seen(progress(7), b=failed("b", "ValueError: x"))
    first = restarts.failure(view, "failed")
    assert "epoch 2, step 7" in refusal(view, first)
    assert refusal(seen(progress(8), b=failed("b", "ValueError: x")), first) == ""
    assert refusal(seen(progress(7), b=failed("b", "KeyError: y")), first) == ""


def test_a_container_that_never_starts_is_not_restarted_for_ever():
    view = seen(b=NodeStatus("b", "exited", 125, "no such device"))
    assert "before its first step" in refusal(view, restarts.failure(view, "failed"))


@pytest.mark.parametrize("a", [None, failed("a", "Connection closed by peer", secondary=True)])
def test_a_kill_at_the_same_step_twice_is_restarted(a):
    view = seen(progress(7), a=a, b=failed("b", "killed by SIGKILL", 137))
    assert refusal(view, restarts.failure(view, "failed")) == ""


def test_bad_input_used_up_restarts_and_late_nodes_are_not_restarted():
    assert "refused" in refusal(seen(a=failed("a", "--batch 1", 2)))
    lost = seen(b=NodeStatus("b", "lost"))
    past = [restarts.failure(lost, "failed")] * 2
    assert "restarted 2 times" in refusal(seen(progress(1), b=NodeStatus("b", "lost")), *past)
    assert "never joined" in restarts.refusal(JOB, seen(), "late", [restarts.failure(seen(), "late")])


def test_the_docs_have_the_rules():
    """First a list of the rules against a restart, then a table of the others."""
    text = (ROOT / "docs/how-to/failures.md").read_text()
    lines = re.search(r"restarted if\n\n((?:- .*\n)+)", text)[1]
    table = re.search(r"^\| the attempt ends because .*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]
    rows = [
        (line[2:].rstrip(",.").removesuffix(", or"), "no restart", "") for line in lines.splitlines()
    ] + rows
    refusals = [(rule.when, "no restart", "") for rule in restarts.RULES if rule.why_not]
    *requeues, anything_else = [rule.when for rule in restarts.RULES if not rule.why_not]
    same = "restart on the same nodes"
    others = "restart with a spare, with fewer nodes (`--nodes 2:4`), or when the machine answers again"
    assert rows == [
        *refusals,
        *((when, then, "requeued") for when, then in zip(requeues, (same, others), strict=True)),
        (anything_else, same, "not restarted"),
    ]


def test_a_batch_script_requeues_after_the_ends_that_the_rules_name():
    job = replace(
        JOB, hosts=(), spares=(), queue=Queue(Machine("login", "", login="ann@login", run_dir="/r"), {})
    )
    (text,) = BACKENDS["slurm"].plan(job, attempt=1, port=0).steps[0].files.values()
    (words,) = re.findall("^requeue_after='(.*)'$", text, re.MULTILINE)
    assert words.split() == [queued.ENDED_WITH_CHECKPOINT, queued.ENDED_WITHOUT_CODE]


def test_every_rule_decides():
    """Each rule is the first that applies for an attempt; without it another one would decide."""
    lost = seen(b=NodeStatus("b", "lost", detail="gone"))
    error = seen(progress(7), b=failed("b", "ValueError: x"))
    early = seen(b=failed("b", "ValueError: x"))
    cancelled = seen(b=NodeStatus("b", "exited", 143, is_cancelled=True))
    cases = {
        "scancel": (JOB, cancelled, "failed", 1),
        "a pod can never start": (
            JOB,
            seen(a=NodeStatus("a", "exited", 2, "no image", is_final=True)),
            "failed",
            1,
        ),
        "exits with 2": (JOB, seen(a=failed("a", "--batch 1", 2)), "failed", 1),
        "did not join": (JOB, seen(), "late", 1),
        "before its first step": (JOB, early, "failed", 2),
        "at the same step": (JOB, error, "failed", 2),
        "`--max-restarts` is 0": (replace(JOB, max_restarts=0), lost, "failed", 1),
        "restarted `--max-restarts` times": (JOB, lost, "failed", 3),
        "exit code 75": (JOB, seen(b=failed("b", "", 75)), "failed", 1),
        "is gone": (JOB, lost, "failed", 1),
        "anything else": (JOB, error, "failed", 1),
    }
    assert len(cases) == len(restarts.RULES)
    for rule, (words, (job, view, verdict, times)) in zip(restarts.RULES, cases.items(), strict=True):
        ended = restarts.Ended(job, view, verdict, [restarts.failure(view, verdict)] * times)
        assert words in rule.when
        assert next(each for each in restarts.RULES if each.applies(ended)) is rule


WELL = dict.fromkeys("abcd")


def names_of(job):
    return "" if job is None else "".join(host.name for host in job.hosts)


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
    assert names_of(restarts.choose(JOB, state)) == names


def test_fewer_nodes_only_with_min_nodes():
    state = WELL | {"a": AWAY, "c": AWAY, "d": AWAY}
    assert names_of(restarts.choose(replace(JOB, min_nodes=1), state)) == "b"


def with_gpus(machines, *counts):
    return tuple(
        replace(machine, gpus=tuple(range(count))) for machine, count in zip(machines, counts, strict=True)
    )


UNEQUAL = replace(
    JOB, procs_per_node=(2, 1), hosts=with_gpus(HOSTS, 2, 4), spares=with_gpus(SPARES, 3, 2), min_nodes=1
)


@pytest.mark.parametrize(
    ("procs", "lost", "names", "numbers"),
    [
        ((2, 1), "", "ab", (2, 1)),
        ((2, 1), "a", "cb", (2, 1)),
        ((2, 1), "b", "ac", (2, 1)),
        ((2, 1), "ac", "db", (2, 1)),
        ((2, 1), "bcd", "a", (2,)),
        ((2, 1), "acd", "b", (1,)),
        ("all", "", "ab", (2, 4)),
        ("all", "a", "cb", (3, 4)),
        ("all", "acd", "b", (4,)),
    ],
)
def test_a_spare_gets_the_number_of_the_node_that_it_replaces_or_with_all_its_own(
    procs, lost, names, numbers
):
    job = restarts.choose(replace(UNEQUAL, procs_per_node=procs), WELL | dict.fromkeys(lost, AWAY))
    assert (names_of(job), job.procs, job.world_size, job.nodes) == (
        names,
        numbers,
        sum(numbers),
        len(numbers),
    )
    plan = BACKENDS["ssh"].plan(job, attempt=2, port=20000)
    assert [len(node.gpus) for node in plan.nodes] == list(numbers)


def test_a_spare_is_surveyed_for_the_largest_node():
    """Before it is known which node it will replace."""
    surveyed = UNEQUAL.on((*UNEQUAL.hosts, *UNEQUAL.spares))
    assert surveyed.procs == (2, 1, 2, 2)
    assert replace(UNEQUAL, procs_per_node="all").on(UNEQUAL.spares).procs == (3, 2)
    assert UNEQUAL.on(UNEQUAL.hosts[1:]).procs == (1,)


def test_a_node_that_does_not_answer_is_not_late():
    """`attach` long after the start, with a slow sshd on one machine: it may have joined."""
    dark = job_state.fold(
        seen(), [NodeStatus("a", "starting"), NodeStatus("b", "starting", silent="why")], [], 900.0
    )
    assert job_state.judge(seen(), 900.0, 300) == "late"
    assert job_state.judge(dark, 900.0, 300) == "waiting"


def test_a_job_without_steps_is_stalled_but_not_during_validation():
    view = seen(progress(3), ready(0), ready(1))
    assert job_state.judge(view, 160.0, 300, 60) == "joined"
    assert job_state.judge(view, 171.0, 300, 60) == "stalled"  # the step was observed at 110
    assert job_state.judge(view, 171.0, 300, 0) == "joined"
    alive = event({"event": "heartbeat", "node": 0, "time": 168.0, "phase": "validation", "idle_s": 1.0})
    view = job_state.fold(view, [NodeStatus("a", "starting"), NodeStatus("b", "starting")], [alive], 168.0)
    assert job_state.judge(view, 170.0, 300, 60) == "joined"


def test_a_job_is_not_stalled_while_its_old_log_is_read():
    """A launcher that attaches after hours reads the log in parts, the oldest first."""
    view = seen(progress(3), ready(0), ready(1))
    view = job_state.fold(
        view, [NodeStatus("a", "starting"), NodeStatus("b", "starting")], [progress(4)], 9000.0
    )
    assert job_state.judge(view, 9001.0, 300, 60) == "joined"
    assert job_state.judge(view, 9061.0, 300, 60) == "stalled"
