"""The watch of a pod whose kubelet hangs. A program in the place of kubectl never answers."""

import os

from cluster.backends.kubernetes import pods
from cluster.backends.kubernetes.kubectl import Kubectl
from cluster.backends.kubernetes.pods import PodWatch
from cluster.backends.kubernetes.waiting import PodState
from cluster.spec.model import Job, Machine, Node, NodeStatus, Plan
from tests.conftest import wait_until


def test_a_kubelet_that_hangs_is_named_before_the_poll_ends(tmp_path, monkeypatch):
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(pods, "_TIMEOUT_S", 100.0)  # a busy machine must not see the end of the poll
    node = Node("node-0", Machine("kubernetes", "", run_dir="/runs"))
    plan = Plan(Job("x", ("true",), 1, 1, str(tmp_path)), 1, "kubernetes", (node,), "x", 1)
    watch = PodWatch(plan, 0)
    state = PodState(NodeStatus("node-0", "starting"), runs=True, host="n1")
    watch.start(Kubectl())
    assert watch.status(state).silent == ""
    assert wait_until(
        lambda: watch.status(state).silent.startswith("its machine n1 has not answered for"), timeout_s=60
    )
    assert watch.status(state).phase == "starting"
    assert watch.error is None
