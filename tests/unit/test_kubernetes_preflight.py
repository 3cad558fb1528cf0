"""The parts of the preflight check that read what a cluster has said."""

from decimal import Decimal

import pytest

from cluster.backends.kubernetes import preflight
from cluster.backends.kubernetes.kubectl import NotFoundError
from cluster.backends.kubernetes.retries import Retries, is_half_started
from cluster.backends.kubernetes.waiting import PodState
from cluster.errors import UsageError
from cluster.spec.node_status import NodeStatus

#: As `kubectl auth can-i --list --no-headers` prints it.
RULES = """\
pods                                            []             []    [create get list watch delete]
pods/exec                                       []             []    [create get]
secrets                                         []             [one]    [create]
jobs.batch                                      []             []    [*]
                                                [/api/*]       []    [get]
"""


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("create", "pods", True),
        ("patch", "pods", False),
        ("create", "pods/exec", True),
        ("get", "pods/log", False),
        ("create", "secrets", False),  # only one of a name
        ("delete", "jobs.batch", True),
        ("get", "services", False),
    ],
)
def test_rights_are_read_from_the_list(verb, resource, allowed):
    assert preflight._is_allowed(RULES, verb, resource) is allowed


def test_an_admin_may_do_everything():
    assert preflight._is_allowed("*.*    []    []    [*]\n", "create", "pods/exec")


def pod(**spec):
    return {
        "spec": {
            "containers": [
                {"name": "node", "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "1Gi"}}}
            ],
            **spec,
        }
    }


def test_what_the_pods_name_and_request():
    volumes = [
        {"persistentVolumeClaim": {"claimName": "data"}},
        {"secret": {"secretName": "x-secrets"}},
        {"emptyDir": {}},
    ]
    one = pod(volumes=volumes, imagePullSecrets=[{"name": "registry"}], priorityClassName="high")
    needs = preflight.Needs("x", True, [one, one], "", secrets=True)
    assert needs.named("persistentvolumeclaim") == ["data"]
    assert needs.named("secret") == ["registry"]  # the job creates its own
    assert needs.named("priorityclass") == ["high"]
    assert needs.named("serviceaccount") == []
    assert needs.devices == {"nvidia.com/gpu": 2}
    requests = preflight._requests(needs.pods)
    assert requests["requests.nvidia.com/gpu"] == 4
    assert requests["limits.memory"] == requests["memory"] == Decimal(2 * 1024**3)
    assert requests["pods"] == 2


def state(*, host="", wants_room=False):
    return PodState(NodeStatus("node-0", "pending"), host=host, wants_room=wants_room)


def test_a_job_is_half_started_only_while_a_part_waits_for_room():
    assert is_half_started([state(host="n0"), state(wants_room=True)])
    assert not is_half_started([state(host="n0"), state(host="n1")])
    assert not is_half_started([state(wants_room=True), state(wants_room=True)])
    assert not is_half_started([state(host="n0"), state()])  # the image is pulled
    assert not is_half_started([])


def test_the_time_counts_only_while_the_job_is_half_started():
    now = [100.0]
    retries = Retries(clock=lambda: now[0])
    assert retries.note(True) == 0
    now[0] = 130.0
    assert retries.note(True) == 30
    assert retries.note(False) == 0
    assert retries.note(True) == 0


def test_tries_are_random_and_rarer_each_time():
    now = [0.0]
    waits = []
    for _ in range(50):
        retries = Retries(clock=lambda: now[0])
        waits.append([retries.give_up("half") for _ in range(6)])
        assert retries.is_waiting
        assert retries.detail.startswith("half; trying again at ")
    for nth, most in enumerate((10, 20, 40, 60, 60, 60)):
        column = [each[nth] for each in waits]
        assert 5 <= min(column) <= max(column) <= most
        assert len(set(column)) > 10  # two jobs do not meet again


class Cluster:
    """A cluster with these machines (what each can allocate) and claims (the access modes of each)."""

    def __init__(self, machines=(), claims=None):
        self.objects = {
            "nodes": [{"metadata": {}, "status": {"allocatable": each}} for each in machines],
            **{name: [{"spec": {"accessModes": modes}}] for name, modes in (claims or {}).items()},
        }

    def get(self, kind, *names):
        try:
            return self.objects[names[0] if names else kind]
        except KeyError:
            raise NotFoundError("not found") from None


def asks_for(limits, *, pods=2, gpu="nvidia.com/gpu", sidecar=None, **spec):
    containers = [{"name": "node", "resources": {"limits": limits}}]
    if sidecar:
        containers.insert(0, {"name": "proxy", "resources": {"limits": sidecar}})
    one = {"spec": {"containers": containers, **spec}}
    return preflight.Needs("x", True, [one] * pods, "", secrets=False, gpu_resource=gpu)


@pytest.mark.parametrize(
    "gpu", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "amd.com/gpu", "habana.ai/gaudi"]
)
def test_the_gpus_are_counted_and_other_devices_are_not_taken_for_them(gpu):
    devices = {"rdma/hca": "1", "memory": "1Gi", gpu: "4"}  # in this order, as the section is before the GPUs
    machine = {"rdma/hca": "8", gpu: "4", "cpu": "8"}
    assert preflight._devices(Cluster([machine] * 2), asks_for(devices, gpu=gpu)) == []
    with pytest.raises(
        UsageError, match=f"2 pods need 4 {gpu} and 1 rdma/hca each, but the cluster has room for 1"
    ):
        preflight._devices(Cluster([machine, {**machine, gpu: "3"}]), asks_for(devices, gpu=gpu))
    with pytest.raises(UsageError, match=f"no machine has {gpu}; no machine of the cluster has a GPU"):
        preflight._devices(Cluster([{"rdma/hca": "8"}] * 2), asks_for(devices, gpu=gpu))
    with pytest.raises(
        UsageError, match=r"no machine has rdma/hca; the cluster has rdma/hca_shared"
    ) as error:
        preflight._devices(Cluster([{"rdma/hca_shared": "8", gpu: "4"}] * 2), asks_for({**devices}, gpu=gpu))
    assert error.value.hint.startswith("devices:")


def test_devices_without_gpus_and_those_of_a_sidecar():
    assert preflight._devices(Cluster([{"rdma/hca": "1"}] * 2), asks_for({"rdma/hca": 1})) == []
    assert preflight._devices(Cluster(), asks_for({"memory": "1Gi"}, sidecar={"nvidia.com/gpu": 1})) == []


def claims_of(modes, pods):
    volumes = [{"persistentVolumeClaim": {"claimName": "data"}}]
    return preflight._claims(Cluster(claims={"data": modes}), asks_for({}, pods=pods, volumes=volumes))


def test_claims_that_several_pods_cannot_mount():
    assert (
        claims_of(["ReadWriteMany"], 2)
        == claims_of(["ReadOnlyMany"], 2)
        == claims_of(["ReadWriteOncePod"], 1)
        == []
    )
    assert claims_of(["ReadWriteOnce"], 1) == []
    assert claims_of(["ReadWriteOnce", "ReadWriteMany"], 2) == []
    (warning,) = claims_of(["ReadWriteOnce"], 2)
    assert "PersistentVolumeClaim data: its access mode is ReadWriteOnce" in warning
    assert "ReadWriteMany" in warning
    with pytest.raises(UsageError, match="only one of the job's 3 pods can mount it"):
        claims_of(["ReadWriteOncePod"], 3)
    with pytest.raises(UsageError, match="the namespace has no PersistentVolumeClaim data"):
        preflight._claims(Cluster(), asks_for({}, volumes=[{"persistentVolumeClaim": {"claimName": "data"}}]))


def test_what_the_fields_of_a_pod_refer_to_must_exist():
    node = {
        "name": "node",
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "a"}}},
            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "maybe", "key": "a", "optional": True}}},
        ],
        "envFrom": [{"configMapRef": {"name": "common"}}],
    }
    projected = {"projected": {"sources": [{"secret": {"name": "token"}}, {"configMap": {"name": "ca"}}]}}
    volumes = [{"configMap": {"name": "x-a1-agent"}}, {"secret": {"secretName": "tls"}}, projected]
    init = [{"name": "mesh", "envFrom": [{"secretRef": {"name": "mesh"}}]}]
    one = {"spec": {"containers": [node], "volumes": volumes, "initContainers": init}}
    needs = preflight.Needs("x", True, [one], "", secrets=False, own=frozenset({"x-a1-agent"}))
    assert needs.named("secret") == ["hub", "mesh", "tls", "token"]
    assert needs.named("configmap") == ["ca", "common"]
