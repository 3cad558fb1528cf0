"""The monitor of a pod whose kubelet hangs, or misses a deletion. A program in the place of kubectl never answers."""

import json
import os
from dataclasses import replace

from cluster.backends.kubernetes import pods
from cluster.backends.kubernetes.kubectl import Kubectl
from cluster.backends.kubernetes.manifests import ATTEMPT_LABEL, LAUNCH_LABEL, pod_of
from cluster.backends.kubernetes.pods import PodMonitor
from cluster.backends.kubernetes.waiting import PodState
from cluster.spec.model import Job, JobRecord, Machine, Node, Plan, Queue, nodes_of
from cluster.spec.node_status import NodeStatus
from cluster.store import JobStore
from cluster.supervisor import job_monitor
from tests.conftest import wait_until


def plan(folder):
    node = Node("node-0", Machine("kubernetes", "", run_dir="/runs"))
    return Plan(Job("x", ("true",), 1, 1, str(folder)), 1, "kubernetes", (node,), "x", 1)


def test_a_kubelet_that_hangs_is_named_before_the_poll_ends(tmp_path, monkeypatch):
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(pods, "_TIMEOUT_S", 100.0)  # a busy machine must not see the end of the poll
    monitor = PodMonitor(plan(tmp_path), 0)
    state = PodState(NodeStatus("node-0", "starting"), runs=True, host="n1")
    monitor.start(Kubectl())
    assert monitor.status(state).silent == ""
    assert wait_until(
        lambda: monitor.status(state).silent.startswith("its machine n1 has not answered for"), timeout_s=60
    )
    assert monitor.status(state).phase == "starting"
    assert monitor.error is None


def test_a_kubelet_misses_a_deletion_once_for_each_grace_period(tmp_path, monkeypatch):
    monkeypatch.setattr(pods, "MISSED_S", -3.9)
    monitor = PodMonitor(plan(tmp_path), 0)
    runs = PodState(NodeStatus("node-0", "ready"), runs=True)
    assert not monitor.misses_deletion(runs)
    deleted = replace(runs, deleted="its pod was deleted", grace_s=4)
    assert not monitor.misses_deletion(deleted)
    assert wait_until(lambda: monitor.misses_deletion(deleted), timeout_s=60)
    monkeypatch.setattr(pods, "MISSED_S", 60.0)
    assert not monitor.misses_deletion(replace(deleted, grace_s=2))  # it has been asked again
    monkeypatch.setattr(pods, "MISSED_S", -60.0)
    assert monitor.misses_deletion(replace(deleted, grace_s=2))
    assert not monitor.misses_deletion(replace(deleted, grace_s=1))  # it cannot be asked for less
    assert not monitor.misses_deletion(replace(deleted, runs=False))


def jobs_in(folder, monkeypatch, answer, *names):
    """Records of jobs in one namespace, and the calls of a program in the place of kubectl."""
    program = folder / "kubectl"
    calls = folder / "calls"
    program.write_text(f'#!/bin/sh\necho "$*" >> {calls}\n{answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    login = Machine("kubernetes", "", run_dir="/runs")
    queue = Queue(login, {"context": "c", "namespace": folder.name})
    store = JobStore(folder / "state")
    for name in names:
        job = Job(name, ("true",), 2, 1, str(folder), image="x:1", queue=queue, launch_id=f"{name:0>16}")
        store.reserve(JobRecord(Plan(job, 1, "kubernetes", nodes_of(job, login), "x", 1), 0.0, job))
    return store, calls


def test_the_pods_of_all_jobs_in_a_namespace_are_listed_once(tmp_path, monkeypatch):
    answer = f"cat {tmp_path}/pods.json"
    store, calls = jobs_in(tmp_path, monkeypatch, answer, "one", "two", "gone", "no-folder")
    pod = {"status": {"phase": "Pending"}, "spec": {"containers": [{"name": "node"}]}}
    items = []
    for record in store:
        labels = {LAUNCH_LABEL: record.job.launch_id, ATTEMPT_LABEL: "1"}
        for node in record.plan.nodes if record.job.name in ("one", "two") else ():
            name = pod_of(record.plan, node)
            items.append({**pod, "metadata": {"name": name, "uid": name, "labels": labels}})
    (tmp_path / "pods.json").write_text(json.dumps({"items": items}))
    for name in ("one", "two", "gone"):
        (tmp_path / name / "attempt-1").mkdir(parents=True)
    found = {each.record.plan.job_id: each for each in job_monitor.poll_all([*store], store)}
    assert sum(" get pods " in f" {call} " for call in calls.read_text().splitlines()) == 1
    states = {"one": "queued", "two": "queued", "gone": "failed", "no-folder": "unreachable"}
    assert {name: each.state for name, each in found.items()} == states
    assert "no-folder: No such file" in found["no-folder"].reason
    assert found["one"].reason == "waits for the scheduler"


def test_a_job_in_a_cluster_that_refuses_the_token_is_unreachable_and_says_why(tmp_path, monkeypatch):
    refuse = "echo 'error: You must be logged in to the server (Unauthorized)' >&2; exit 1"
    store, _ = jobs_in(tmp_path, monkeypatch, refuse, "expired")
    (record,) = store
    store.see(record, "running", {"node-0": "ready", "node-1": "ready"})
    (found,) = job_monitor.poll_all([record], store)
    assert (found.state, found.last_state) == ("unreachable", "running")
    assert found.reason == "the cluster does not accept the credentials in the kubeconfig"
    assert found.words(found.since + 180) == "unreachable for 3 min 00 s; running before"
    (found,) = job_monitor.poll_all([replace(record, job=replace(record.job, launch_id="f" * 16))], store)
    assert found.last_state == ""  # an earlier job had this name
