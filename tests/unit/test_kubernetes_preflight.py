"""The parts of the preflight check that read what a cluster has said."""

from decimal import Decimal

import pytest

from cluster.backends.kubernetes import preflight
from cluster.backends.kubernetes.retries import Retries, is_half_started
from cluster.backends.kubernetes.waiting import PodState
from cluster.spec.model import NodeStatus

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
    return {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2", "memory": "1Gi"}}}], **spec}}


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
    assert needs.gpus == ("nvidia.com/gpu", 2)
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
        assert retries.detail.startswith("half; tries again at ")
    for nth, most in enumerate((10, 20, 40, 60, 60, 60)):
        column = [each[nth] for each in waits]
        assert 5 <= min(column) <= max(column) <= most
        assert len(set(column)) > 10  # two jobs do not meet again
