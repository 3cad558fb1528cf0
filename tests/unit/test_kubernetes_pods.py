"""The watch of a pod whose kubelet hangs, or misses a deletion. A program in the place of kubectl never answers."""

import os
from dataclasses import replace

from cluster.backends.kubernetes import pods
from cluster.backends.kubernetes.kubectl import Kubectl
from cluster.backends.kubernetes.pods import PodWatch
from cluster.backends.kubernetes.waiting import PodState
from cluster.spec.model import Job, Machine, Node, NodeStatus, Plan
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
    watch = PodWatch(plan(tmp_path), 0)
    state = PodState(NodeStatus("node-0", "starting"), runs=True, host="n1")
    watch.start(Kubectl())
    assert watch.status(state).silent == ""
    assert wait_until(
        lambda: watch.status(state).silent.startswith("its machine n1 has not answered for"), timeout_s=60
    )
    assert watch.status(state).phase == "starting"
    assert watch.error is None


def test_a_kubelet_misses_a_deletion_once_for_each_grace_period(tmp_path, monkeypatch):
    monkeypatch.setattr(pods, "MISSED_S", -3.9)
    watch, runs = PodWatch(plan(tmp_path), 0), PodState(NodeStatus("node-0", "ready"), runs=True)
    assert not watch.misses_deletion(runs)
    deleted = replace(runs, deleted="its pod was deleted", grace_s=4)
    assert not watch.misses_deletion(deleted)
    assert wait_until(lambda: watch.misses_deletion(deleted), timeout_s=60)
    monkeypatch.setattr(pods, "MISSED_S", 60.0)
    assert not watch.misses_deletion(replace(deleted, grace_s=2))  # it has been asked again
    monkeypatch.setattr(pods, "MISSED_S", -60.0)
    assert watch.misses_deletion(replace(deleted, grace_s=2))
    assert not watch.misses_deletion(replace(deleted, grace_s=1))  # it cannot be asked for less
    assert not watch.misses_deletion(replace(deleted, runs=False))
