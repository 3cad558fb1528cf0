"""The testbed's Kubernetes: nodes, users, volumes, two nodes that train together, and the effect of each fault."""

import json
import re
import subprocess
import urllib.request

import pytest

from cluster.spec.image import DEFAULT_IMAGE
from tests.conftest import wait_until
from tests.kubernetes.conftest import NAME, OURS
from tests.real.conftest import script

pytestmark = pytest.mark.kubernetes

LABELS = {OURS.partition("=")[0]: OURS.partition("=")[2]}
ALL_REDUCE = """
import os, socket, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} in {socket.gethostname()}: {total.item():g}", flush=True)
dist.destroy_process_group()
"""


def pod(name, *command, node=None, gpus=0, uid=None, subdomain=None, env=(), volumes=(), mounts=()):
    """Return the manifest of a pod that runs a command in the trainer's image."""
    container = {
        "name": "node",
        "image": DEFAULT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in env],
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "hostname": name,
        "containers": [container],
        "volumes": list(volumes),
    }
    if subdomain:
        spec["subdomain"] = subdomain
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    if uid is not None:
        spec["securityContext"] = {"runAsUser": uid, "runAsGroup": uid}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": LABELS}, "spec": spec}


@pytest.fixture
def create(kubectl):
    """Create objects in the namespace ada as ada. They are deleted after the test."""
    created = []

    def create(*objects):
        created.extend((each["kind"], each["metadata"]["name"]) for each in objects)
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return kubectl("create", "--filename", "-", user="ada", text=manifest)

    yield create
    for kind, name in created:
        kubectl("delete", kind, name, "--ignore-not-found", user="ada", timeout_s=120)


@pytest.fixture
def phase(kubectl):
    """Return the phase of a pod in the namespace ada."""
    return lambda name: kubectl("get", "pod", name, "--output", "jsonpath={.status.phase}", user="ada")


def ready(kubectl, node):
    condition = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    return kubectl("get", "node", node, "--output", condition)


def reason_of_pending(kubectl, name):
    return kubectl("get", "pod", name, "--output", "jsonpath={.status.conditions[0].message}", user="ada")


def test_three_nodes_are_ready_with_two_gpus_each(kubectl):
    nodes = json.loads(kubectl("get", "nodes", "--output", "json"))["items"]
    assert {node["metadata"]["name"]: node["status"]["allocatable"]["nvidia.com/gpu"] for node in nodes} == {
        "n0": "2",
        "n1": "2",
        "n2": "2",
    }
    assert {ready(kubectl, name) for name in ("n0", "n1", "n2")} == {"True"}
    assert {node["status"]["nodeInfo"]["kubeletVersion"] for node in nodes} == {"v1.20.2"}


def test_a_user_may_start_pods_only_in_the_own_namespace(kubectl, create, phase):
    create(pod("mine", "true"))
    assert wait_until(lambda: phase("mine") == "Succeeded", 60)
    code, text = kubectl.attempt(
        "create", "--filename", "-", "--namespace", "bob", user="ada", text=json.dumps(pod("mine", "true"))
    )
    assert code == 1
    assert 'User "ada" cannot create resource "pods" in API group "" in the namespace "bob"' in text
    for arguments in (("get", "nodes"), ("get", "secrets", "--all-namespaces")):
        code, text = kubectl.attempt(*arguments, user="ada")
        assert (code, "Forbidden" in text) == (1, True), text


def test_two_pods_behind_a_headless_service_reduce_a_tensor_with_torch(kubectl, create, phase):
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "run1", "labels": LABELS},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": LABELS,
            "ports": [{"name": "rendezvous", "port": 29500}],
        },
    }
    code = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "code", "labels": LABELS},
        "data": {"all_reduce.py": ALL_REDUCE},
    }
    torchrun = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "run1-0.run1",
        "PET_MASTER_PORT": "29500",
    }
    pods = [
        pod(
            f"run1-{rank}",
            *("entrypoint", "python3", "-m", "torch.distributed.run", "/code/all_reduce.py"),
            gpus=2,
            subdomain="run1",
            env=[*torchrun.items(), ("PET_NODE_RANK", str(rank)), ("OMP_NUM_THREADS", "1")],
            volumes=[{"name": "code", "configMap": {"name": "code"}}],
            mounts=[("code", "/code")],
        )
        for rank in range(2)
    ]
    create(service, code, *pods)
    phases = wait_until(
        lambda: (
            {phase("run1-0"), phase("run1-1")} <= {"Succeeded", "Failed"}
            and (phase("run1-0"), phase("run1-1"))
        ),
        240,
    )
    logs = kubectl("logs", "run1-0", user="ada") + kubectl("logs", "run1-1", user="ada")
    assert phases == ("Succeeded", "Succeeded"), logs
    assert sorted(re.findall(r"rank \d of 4 in run1-\d: \d+", logs)) == [
        "rank 0 of 4 in run1-0: 10",
        "rank 1 of 4 in run1-0: 10",
        "rank 2 of 4 in run1-1: 10",
        "rank 3 of 4 in run1-1: 10",
    ]
    nodes = kubectl("get", "pods", "--output", "jsonpath={.items[*].spec.nodeName}", user="ada").split()
    assert len(set(nodes)) == 2


def test_every_user_id_writes_into_the_claim_that_all_nodes_share(kubectl, create, phase):
    claim = [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    at = [("runs", "/runs")]
    seen = ""
    for number, (node, uid) in enumerate((("n0", 1000), ("n1", 0), ("n2", 1234))):
        name = f"writer-{number}"
        line = f"{node} {uid}"
        write = f"cat /runs/log-*; rm -f /runs/log-{number}; echo {line} >/runs/log-{number}"
        create(pod(name, "sh", "-c", write, node=node, uid=uid, volumes=claim, mounts=at))
        assert wait_until(lambda name=name: phase(name) in ("Succeeded", "Failed"), 60)
        assert phase(name) == "Succeeded", kubectl("logs", name, user="ada")
        assert seen in kubectl("logs", name, user="ada")
        seen = line
    create(pod("remover", "sh", "-c", "rm /runs/log-*", node="n0", uid=0, volumes=claim, mounts=at))
    assert wait_until(lambda: phase("remover") == "Succeeded", 60)


def test_a_port_of_a_pod_is_forwarded_and_a_command_runs_in_it(kubectl, create, phase):
    create(pod("server", "python3", "-m", "http.server", "8000"))
    kubectl("wait", "--for=condition=Ready", "pod/server", "--timeout=60s", user="ada", timeout_s=90)
    code, text = kubectl.attempt("exec", "server", "--", "sh", "-c", "echo words; exit 7", user="ada")
    assert (code, text.startswith("words\n")) == (7, True)
    listening = "import socket; socket.create_connection(('localhost', 8000))"
    assert wait_until(
        lambda: kubectl.attempt("exec", "server", "--", "python3", "-c", listening, user="ada")[0] == 0, 60
    )
    argv = kubectl.argv("port-forward", "server", ":8000", user="ada")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as forward:
        try:
            port = re.search(r"127\.0\.0\.1:(\d+)", forward.stdout.readline())[1]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                assert b"Directory listing" in answer.read()
        finally:
            forward.kill()


def test_a_dead_kubelet_makes_its_node_not_ready_and_its_pods_run_on(kubectl, create, phase, fault):
    create(pod("sleeper", "sleep", "1000", node="n1"))
    assert wait_until(lambda: phase("sleeper") == "Running", 60)
    fault("kubelet-kill", "n1")
    assert wait_until(lambda: ready(kubectl, "n1") == "Unknown", 90)
    assert phase("sleeper") == "Running"
    code, text = kubectl.attempt("exec", "sleeper", "--", "true", user="ada")
    assert (code, "connection refused" in text) == (1, True), text
    fault("kubelet-start", "n1")
    assert wait_until(lambda: ready(kubectl, "n1") == "True", 60)
    assert wait_until(lambda: kubectl.attempt("exec", "sleeper", "--", "true", user="ada")[0] == 0, 60)


@pytest.mark.parametrize(("inject", "undo"), [("kubelet-freeze", "kubelet-thaw"), ("cut", "join")])
def test_a_silent_node_is_not_ready_until_it_returns(kubectl, fault, inject, undo):
    fault(inject, "n2")
    assert wait_until(lambda: ready(kubectl, "n2") == "Unknown", 90)
    assert ready(kubectl, "n0") == "True"
    fault(undo, "n2")
    assert wait_until(lambda: ready(kubectl, "n2") == "True", 60)


def test_a_dead_api_server_refuses_and_pods_run_on(kubectl, create, phase, fault):
    create(pod("sleeper", "sleep", "1000", node="n1"))
    assert wait_until(lambda: phase("sleeper") == "Running", 60)
    fault("api-kill")
    code, text = kubectl.attempt("get", "pods", user="ada")
    assert (code, "refused" in text) == (1, True), text
    fault("api-start")
    assert phase("sleeper") == "Running"
    assert kubectl("exec", "sleeper", "--", "cat", "/proc/1/comm", user="ada") == "sleep"


def test_a_frozen_api_server_does_not_answer(kubectl, fault):
    fault("api-freeze")
    code, text = kubectl.attempt("get", "pods", "--request-timeout=2s", user="ada")
    # kubectl's words depend on whether it was still connecting
    assert (code, bool(re.search("[Tt]imeout|deadline exceeded", text))) == (1, True), text
    fault("api-thaw")
    assert kubectl("get", "pods", user="ada") == "No resources found in ada namespace."


def test_a_quota_refuses_a_pod_that_wants_more(kubectl, create, phase, fault):
    fault("quota", "ada", "1")
    wants = json.dumps(pod("greedy", "true", gpus=2))
    code, text = kubectl.attempt("create", "--filename", "-", user="ada", text=wants)
    assert (code, "exceeded quota: testbed-fault" in text) == (1, True), text
    fault("no-quota", "ada")
    create(pod("greedy", "true", gpus=2))
    assert wait_until(lambda: phase("greedy") == "Succeeded", 60)


def test_pods_wait_for_gpus_that_do_not_exist_or_are_in_use(kubectl, create, phase, fault):
    fault("gpus", "n0", "0")
    fault("busy", "n1")
    fault("busy", "n2")
    create(pod("waiter", "true", gpus=1))
    assert wait_until(lambda: "3 Insufficient nvidia.com/gpu" in reason_of_pending(kubectl, "waiter"), 60)
    assert phase("waiter") == "Pending"
    fault("free", "n2")
    assert wait_until(lambda: phase("waiter") == "Succeeded", 90)
    assert kubectl("get", "pod", "waiter", "--output", "jsonpath={.spec.nodeName}", user="ada") == "n2"


def test_down_removes_every_trace_from_the_hosts_and_up_starts_again(kubectl, create, phase):
    create(pod("sleeper", "sleep", "1000", node="n0"))
    assert wait_until(lambda: phase("sleeper") == "Running", 60)
    traces = (
        "iptables-save; ip route; ip link; cut -d ' ' -f 2 /proc/mounts; ps -eo args; docker ps --all; docker images;"
        "ls -d /shared/* /var/lib/* /etc/* /var/log/* /dev/* /run/*; sysctl net.ipv4.conf.all.route_localnet"
    )
    script("kubernetes/down.sh")
    try:
        found = {
            host: subprocess.run(
                ["docker", "exec", f"{NAME}-{host}", "sh", "-c", traces],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for host in ("n0", "n1", "n2")
        }
    finally:
        script("kubernetes/up.sh")
    words = (
        r".*(?:KUBE|kube|cni0|/cni|dockershim|10\.244\.|kmsg|pause|proc/sys/vm|sleeper|route_localnet = 1).*"
    )
    assert [re.findall(words, text) for text in found.values()] == [[], [], []]
    assert kubectl("get", "pods", "--all-namespaces") == "No resources found"
