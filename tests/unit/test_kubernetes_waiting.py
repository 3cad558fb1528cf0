"""What pods say, by the JSON that a real cluster (1.20) printed for each case; later versions' words are added here."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from cluster.backends.kubernetes import pods, waiting
from cluster.spec.node_status import NodeStatus

PODS = json.loads(Path(__file__).with_name("kubernetes_pods.json").read_text())

#: Case: phase, exit code, the end of the attempt for good, and words of the sentence.
CASES = {
    "gpus": (
        "pending",
        None,
        False,
        "no machine is free: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
    ),
    "selector": ("pending", None, False, "3 node(s) didn't match"),
    "files": ("pending", None, False, "waits for its files"),
    "claim": ("exited", 2, True, "no PersistentVolumeClaim nope"),
    "invalid": ("exited", 2, True, "trainer:NO:PE is not the name of a container image"),
    "never": ("exited", 2, True, "nothere:1 is not on the machine"),
    "mount": ("exited", 2, True, 'a volume cannot be mounted: "v" configmap "nope" not found'),
    "hostpath": ("exited", 2, True, "/nope is not a directory"),
    "hostpath with files": ("exited", 2, True, "/no/such is not a directory"),
    "secret": ("exited", 2, True, 'its container cannot be configured: secret "nope" not found'),
    "running": ("starting", None, False, ""),
    "done": ("exited", 0, False, ""),
    "exit3": ("exited", 3, False, "its container ended with exit code 3"),
    "oom": ("exited", 137, False, "ran out of memory"),
    "command": ("exited", 127, False, 'its command cannot be started: exec: "/no/such"'),
    "deadline": ("lost", None, False, "it ran longer than activeDeadlineSeconds allows"),
}


def observed(case, pod=None, events=None):
    pod = pod or PODS[case]["pod"]
    events = PODS[case]["events"] if events is None else events
    return waiting.observed("node-0", pod, events if waiting.needs_events(pod) else ())


@pytest.mark.parametrize("case", CASES)
def test_each_recorded_pod(case):
    phase, code, is_final, words = CASES[case]
    found = observed(case)
    assert (found.status.phase, found.status.exit_code, found.is_final) == (phase, code, is_final)
    assert words in found.status.detail
    assert bool(words) == bool(found.status.detail)
    assert "rpc error" not in found.status.detail


def test_only_a_running_container_can_be_asked():
    assert {case for case in CASES if observed(case).runs} == {"running"}
    assert {case for case in CASES if observed(case).receives} == {"files"}
    assert {case for case in CASES if observed(case).wants_room} == {"gpus"}


def test_an_image_is_final_after_three_tries_or_if_the_registry_says_so():
    pod = PODS["pull"]["pod"]
    events = deepcopy(PODS["pull"]["events"])
    failed = [event for event in events if event["message"].startswith("Failed to pull image")]
    assert failed
    for event in failed:
        event["count"] = 1
    once = observed("pull", events=failed[:1])
    assert (once.status.phase, once.is_final) == ("pending", False)
    assert "registry-1.docker.io" in once.status.detail
    failed[0]["count"] = waiting.PULL_TRIES
    assert observed("pull", pod, failed[:1]).is_final
    failed[0] |= {
        "count": 1,
        "message": 'Failed to pull image "x:1": manifest for x:1 not found: manifest unknown',
    }
    assert observed("pull", pod, failed[:1]).is_final


def test_a_silent_machine_is_seen_by_the_conditions():
    pod = deepcopy(PODS["running"]["pod"])
    assert not observed("running", pod).host_is_silent
    ready = next(each for each in pod["status"]["conditions"] if each["type"] == "Ready")
    ready["status"] = "False"  # all that the node controller changes
    found = observed("running", pod)
    assert found.host_is_silent
    assert found.runs
    starting = next(each for each in pod["status"]["conditions"] if each["type"] == "ContainersReady")
    starting["status"] = "False"
    assert not observed("running", pod).host_is_silent


def test_a_deleted_pod_says_who_deleted_it():
    assert observed("deleted").deleted == "its pod was deleted"
    preempted = {"reason": "Preempted", "message": "Preempted by default/hi-0 on node n0"}
    assert observed("deleted", events=[preempted]).deleted.startswith(
        "it was preempted: Preempted by default/hi-0"
    )
    assert (
        waiting.gone("node-0", [preempted]).detail == "it was preempted: Preempted by default/hi-0 on node n0"
    )
    assert waiting.gone("node-0").detail == "its pod was deleted"
    assert observed("running").deleted == ""


def test_a_volume_that_the_kubelet_mounts_at_its_next_try_is_no_reason():
    pod = PODS["mount"]["pod"]
    events = deepcopy(PODS["mount"]["events"])
    for event in events:
        event["message"] = (
            'MountVolume.SetUp failed for volume "agent" : failed to sync configmap cache: timed out'
        )
    assert observed("", pod, events).status.detail == "its container is being created"


def test_a_deleted_pod_that_has_failed_without_a_reason_was_deleted():
    state = observed("deleted")
    failed = NodeStatus("node-0", "lost", detail=waiting.FAILED)
    assert pods._if_deleted(failed, state).detail == "its pod was deleted"
    evicted = NodeStatus("node-0", "lost", detail="it was evicted")
    assert pods._if_deleted(evicted, state).detail == "it was evicted"


def test_later_versions_name_the_disruption():
    pod = deepcopy(PODS["exit3"]["pod"])
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "by hi-0",
    }
    pod["status"]["conditions"].append(target)
    status = observed("exit3", pod).status
    assert (status.phase, status.detail) == (
        "lost",
        "it was preempted by a pod with a higher priority: by hi-0",
    )
    gated = deepcopy(PODS["gpus"]["pod"])
    gated["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    assert "queue" in observed("gpus", gated).status.detail


@pytest.mark.parametrize("kind", ["docker-pullable://registry/t@", "docker://", "registry/t@", ""])
def test_nodes_with_another_image_end_and_are_named(kind):
    def state(node, digest, of_kind=kind):
        pod = deepcopy(PODS["running"]["pod"])
        pod["status"]["containerStatuses"][0]["imageID"] = f"{of_kind}sha256:{digest}" if digest else ""
        return waiting.observed(node, pod)

    first = "1234567890ab" + "0" * 52
    second = "fedcba098765" + "0" * 52
    assert waiting.different_image("t:latest", [state("node-0", first), state("node-1", first)]) == {}
    assert waiting.different_image("t:latest", [state("node-0", first), state("node-1", "")]) == {}
    assert (
        waiting.different_image("t:latest", [state("node-0", first), state("node-1", second, "other/t@")])
        == {}
    )
    states = [state("node-0", ""), state("node-1", first), state("node-2", first), state("node-3", second)]
    ((node, found),) = waiting.different_image("t:latest", states).items()
    assert (node, found.phase, found.exit_code, found.is_final) == ("node-3", "exited", 2, True)
    assert "its image t:latest is fedcba098765, but on node-1 it is 1234567890ab" in found.detail


def with_sidecar(case, state, *, node_state=None, kind="initContainers"):
    """The pod of a case in which Kubernetes (or an admission webhook) has added the sidecar mesh.

    The shape is that of Kubernetes 1.29; the recorded pods are from 1.20, which has no native sidecars.
    """
    pod = deepcopy(PODS[case]["pod"])
    native = {"restartPolicy": "Always"} if kind == "initContainers" else {}
    statuses = {"initContainers": "initContainerStatuses", "containers": "containerStatuses"}[kind]
    pod["spec"].setdefault(kind, []).insert(0, {"name": "mesh", "image": "mesh:1", **native})
    pod["status"].setdefault(statuses, []).insert(0, {"name": "mesh", "image": "mesh:1", "state": state})
    if node_state is not None:
        (node,) = (each for each in pod["status"]["containerStatuses"] if each["name"] == "node")
        node["state"] = node_state
    return pod


RUNS = {"running": {"startedAt": "2026-11-28T10:00:00Z"}}
FAILS = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}


def pull_event(container, image, kind="containers"):
    return {
        "reason": "Failed",
        "message": f'Failed to pull image "{image}": rpc error: code = Unknown desc = {image} not found',
        "involvedObject": {"fieldPath": f"spec.{kind}{{{container}}}"},
        "count": 1,
    }


def test_a_sidecar_that_runs_is_not_a_wait_for_files():
    creating = {"waiting": {"reason": "PodInitializing"}}
    found = observed("", with_sidecar("mount", RUNS, node_state=creating), [])
    assert (found.receives, found.status.detail) == (False, "its container is being created")
    found = observed("", with_sidecar("files", RUNS), [])  # beside ours, which runs, too
    assert (found.receives, found.status.detail) == (True, "waits for its files")
    assert observed("", with_sidecar("running", RUNS), []).runs
    pod = with_sidecar("files", RUNS)
    pod["spec"]["initContainers"] = [{"name": "fetch"}]
    pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": RUNS}]
    found = observed("", pod, [])
    assert (found.receives, found.status.detail) == (False, "its init container fetch runs")


@pytest.mark.parametrize("kind", ["initContainers", "containers"])
def test_the_image_that_cannot_be_pulled_is_named(kind):
    ours = PODS["pull"]["pod"]["spec"]["containers"][0]["image"]
    events = [pull_event("mesh", "mesh:1", kind), pull_event("node", ours)]
    found = observed("", with_sidecar("pull", RUNS, node_state=FAILS, kind=kind), events)
    assert f"image {ours} cannot be pulled: {ours} not found" in found.status.detail
    assert "mesh" not in found.status.detail
    creating = {"waiting": {"reason": "PodInitializing"}}
    found = observed("", with_sidecar("pull", FAILS, node_state=creating, kind=kind), events)
    assert (
        "its container mesh: the container image mesh:1 cannot be pulled: mesh:1 not found"
        in found.status.detail
    )
    assert ours not in found.status.detail
    pulling = [{**pull_event("mesh", "", kind), "reason": "Pulling", "message": "Pulling image"}]
    found = observed("", with_sidecar("pull", creating, node_state=creating, kind=kind), pulling)
    assert found.status.detail == "pulls the container image mesh:1"


def test_a_sidecar_that_exits_does_not_end_its_node():
    ended = {"terminated": {"exitCode": 3, "reason": "Error"}}
    creating = {"waiting": {"reason": "PodInitializing"}}
    for kind in ("initContainers", "containers"):
        assert observed("", with_sidecar("running", ended, kind=kind), []).runs
        assert (
            observed("", with_sidecar("pull", ended, node_state=creating, kind=kind), []).status.phase
            == "pending"
        )
    loops = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    found = observed("", with_sidecar("pull", loops, node_state=creating), [])
    assert (found.status.phase, found.is_final) == ("pending", False)
    assert (
        found.status.detail
        == "its container mesh: it exits again and again: back-off 10s restarting failed container"
    )
    pod = with_sidecar("pull", ended, node_state=creating)
    del pod["spec"]["initContainers"][0]["restartPolicy"]  # an ordinary init container
    assert observed("", pod, []).status.phase == "exited"
