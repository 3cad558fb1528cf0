"""States of jobs from their nodes' status files."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.backends import BACKENDS
from cluster.spec.model import Job, JobRecord
from cluster.store import JobStore
from cluster.supervisor import job_monitor
from cluster.web.live import POLL_S, LiveJob, poll_list
from tests.unit.node_scripts import started


def test_the_state_of_a_job_is_known_without_its_logs(tmp_path):
    """Reading the log is an error, because it is a folder."""
    job = Job("job", ("-m", "trainer"), 1, 1, str(tmp_path))
    record = JobRecord(BACKENDS["local"].plan(job, attempt=1, port=20000), time.time(), job)
    store = JobStore(tmp_path / "state")
    store.reserve(record)
    folder = Path(record.plan.attempt_dir)
    (folder / "node-0.log").mkdir(parents=True)
    joining = {"event": "joining", "node": 0, "time": time.time(), "reachable": True, "listening": True}
    ready = {
        "event": "ready",
        "node": 0,
        "time": time.time(),
        "world_size": 1,
        "backend": "gloo",
        "device": "cpu",
    }
    metric = {"event": "metric", "node": 0, "time": time.time(), "epoch": 7, "map50": 0.5}
    with started(folder, "node-0") as process:
        seen = []
        for events in ([], [joining], [joining, ready], [joining, ready, metric]):
            agent = {
                "phase": "running",
                "heartbeat": time.time(),
                "events": {each["event"]: each for each in events},
            }
            (folder / "node-0.json").write_text(json.dumps(agent) + "\n")
            _, state, view, *_ = job_monitor.poll(record, store)
            seen.append((state, view.nodes[0].phase, view.ready_count))
        polled = LiveJob("job", store)
        poll_list([polled], store)
        assert polled.row().state == "running"
        time.sleep(POLL_S)
        with pytest.raises(IsADirectoryError):  # only the job's own page reads the log, for its curves
            polled.body()
        process.kill()
    waiting = ("starting", "starting", 0), ("joining", "joining", 0)
    assert seen == [*waiting, ("running", "ready", 1), ("running", "ready", 1)]
    assert view.metric.as_json() == metric


def test_a_job_whose_next_attempt_is_being_started_has_not_failed(tmp_path):
    """An attempt is recorded before its nodes have folders. Polled then, they would seem to be lost for good."""
    job = Job("job", ("x.py",), 1, 1, str(tmp_path))
    store = JobStore(tmp_path / "state")
    first = JobRecord(BACKENDS["local"].plan(job, attempt=1, port=20000), time.time(), job, start_lock="job")
    store.reserve(first)
    assert job_monitor.poll(first, store).state == "failed"  # the process that was starting it is gone
    monitor = job_monitor.JobMonitor("job", store)
    polled = LiveJob("job", store)
    with store.supervise("job"):
        _, state, view, *_ = job_monitor.poll(first, store)
        assert (state, [node.phase for node in view.nodes]) == ("starting", ["pending"])
        assert monitor.step() == []
        poll_list([polled], store)
        assert polled.row().state == "starting"
        assert "does not exist" not in polled.body()
        folder = Path(first.plan.attempt_dir)
        folder.mkdir(parents=True)
        with started(folder, "node-0") as process:
            (folder / "node-0.log").write_text("hello\n")
            store.update(replace(first, start_lock=""))
            assert monitor.step() == [("node-0", "hello")]
            assert (monitor.state, monitor.view.nodes[0].phase, monitor.has_ended) == (
                "starting",
                "starting",
                False,
            )
            process.kill()
        monitor.step()
        assert (monitor.state, monitor.has_ended) == ("running", False)  # the supervisor may restart it
        assert job_monitor.poll(store.load("job"), store).state == "running"
        (folder / "node-0.log").write_text("hello\nthe last word\n")
        plan = BACKENDS["local"].plan(job, attempt=2, port=20000)
        store.update(replace(first, plan=plan))
        assert monitor.step() == [("node-0", "the last word")]
        assert (monitor.state, monitor.has_ended) == ("starting", False)
    monitor.step()
    assert (monitor.state, monitor.has_ended) == ("failed", True)
