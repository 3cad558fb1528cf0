"""What pods say, by the JSON that a real cluster (1.20) printed for each case; later versions' words are added here."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from cluster.backends.kubernetes import pods, waiting
from cluster.spec.model import NodeStatus

PODS = json.loads(Path(__file__).with_name("kubernetes_pods.json").read_text())

#: Case: phase, exit code, the end of the attempt for good, and words of the sentence.
CASES = {
    "gpus": ("pending", None, False, "no machine is free: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu"),
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
    pod, events = PODS["pull"]["pod"], deepcopy(PODS["pull"]["events"])
    failed = [event for event in events if event["message"].startswith("Failed to pull image")]
    assert failed
    for event in failed:
        event["count"] = 1
    once = observed("pull", events=failed[:1])
    assert (once.status.phase, once.is_final) == ("pending", False)
    assert "registry-1.docker.io" in once.status.detail
    failed[0]["count"] = waiting.PULL_TRIES
    assert observed("pull", pod, failed[:1]).is_final
    failed[0] |= {"count": 1, "message": 'Failed to pull image "x:1": manifest for x:1 not found: manifest unknown'}
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
    assert observed("deleted", events=[preempted]).deleted.startswith("it was preempted: Preempted by default/hi-0")
    assert waiting.gone("node-0", [preempted]).detail == "it was preempted: Preempted by default/hi-0 on node n0"
    assert waiting.gone("node-0").detail == "its pod was deleted"
    assert observed("running").deleted == ""


def test_a_volume_that_the_kubelet_mounts_at_its_next_try_is_no_reason():
    pod, events = PODS["mount"]["pod"], deepcopy(PODS["mount"]["events"])
    for event in events:
        event["message"] = 'MountVolume.SetUp failed for volume "agent" : failed to sync configmap cache: timed out'
    assert observed("", pod, events).status.detail == "its container is being created"


def test_a_deleted_pod_that_has_failed_without_a_reason_was_deleted():
    state = observed("deleted")
    failed = NodeStatus("node-0", "lost", detail=waiting.FAILED)
    assert pods._if_deleted(failed, state).detail == "its pod was deleted"
    evicted = NodeStatus("node-0", "lost", detail="it was evicted")
    assert pods._if_deleted(evicted, state).detail == "it was evicted"


def test_later_versions_name_the_disruption():
    pod = deepcopy(PODS["exit3"]["pod"])
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "by hi-0"}
    pod["status"]["conditions"].append(target)
    status = observed("exit3", pod).status
    assert (status.phase, status.detail) == ("lost", "it was preempted by a pod with a higher priority: by hi-0")
    gated = deepcopy(PODS["gpus"]["pod"])
    gated["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    assert "queue" in observed("gpus", gated).status.detail


@pytest.mark.parametrize("kind", ["docker-pullable://registry/t@", "docker://", "registry/t@", ""])
def test_nodes_with_another_image_end_and_are_named(kind):
    def state(node, digest, of_kind=kind):
        pod = deepcopy(PODS["running"]["pod"])
        pod["status"]["containerStatuses"][0]["imageID"] = f"{of_kind}sha256:{digest}" if digest else ""
        return waiting.observed(node, pod)

    first, second = "1234567890ab" + "0" * 52, "fedcba098765" + "0" * 52
    assert waiting.different_image("t:latest", [state("node-0", first), state("node-1", first)]) == {}
    assert waiting.different_image("t:latest", [state("node-0", first), state("node-1", "")]) == {}
    assert waiting.different_image("t:latest", [state("node-0", first), state("node-1", second, "other/t@")]) == {}
    states = [state("node-0", ""), state("node-1", first), state("node-2", first), state("node-3", second)]
    ((node, found),) = waiting.different_image("t:latest", states).items()
    assert (node, found.phase, found.exit_code, found.is_final) == ("node-3", "exited", 2, True)
    assert "its image t:latest is fedcba098765, but on node-1 it is 1234567890ab" in found.detail
