"""Errors of kubectl, as versions 1.20 to 1.36 print them, and what the user reads instead."""

import pytest

from cluster.backends.kubernetes.kubectl import (
    ContainerEndedError,
    ForbiddenError,
    Kubectl,
    NodeSilentError,
    NotFoundError,
    QuotaError,
    error_of,
)
from cluster.errors import ClusterError, GpusHeldError, NameTakenError, UnreachableError, UsageError

ERRORS = [
    ('error: context "nope" does not exist', UsageError, "no context nope"),
    (
        "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
        UsageError,
        "no kubeconfig",
    ),
    ("error: current-context must exist in order to minify", UsageError, "has no current context"),
    ("error: cannot locate context gone", UsageError, "no context gone"),
    ("error: cannot locate cluster c", UsageError, "the kubeconfig cannot be used: cannot locate cluster c"),
    (
        'error: error loading config file "/x": yaml: line 3: mapping values are not allowed in this context',
        UsageError,
        "cannot be used: error loading",
    ),
    (
        "Unable to connect to the server: getting credentials: exec: executable gke-gcloud-auth-plugin not found",
        UsageError,
        "logs in with the program gke-gcloud-auth-plugin",
    ),
    (
        "error: cannot exec into a container in a completed pod; current phase is Failed",
        ContainerEndedError,
        "its container has ended",
    ),
    ('error: unable to upgrade connection: container not found ("node")', ContainerEndedError, "has ended"),
    (
        "error: You must be logged in to the server (Unauthorized)",
        UsageError,
        "does not accept the credentials",
    ),
    (
        "Unable to connect to the server: x509: certificate signed by unknown authority",
        UsageError,
        "signed by unknown authority",
    ),
    (
        'Error from server (Forbidden): error when creating "STDIN": pods is forbidden: User "ada" cannot create '
        'resource "pods" in API group "" in the namespace "bob"',
        ForbiddenError,
        "ada has no permission to create pods in the namespace bob",
    ),
    (
        'Error from server (Forbidden): nodes is forbidden: User "ada" cannot list resource "nodes" in API group "" '
        "at the cluster scope",
        ForbiddenError,
        "ada has no permission to list nodes",
    ),
    (
        'Error from server (Forbidden): error when creating "STDIN": pods "x-a1-1" is forbidden: exceeded quota: gpus, '
        "requested: requests.nvidia.com/gpu=2, used: requests.nvidia.com/gpu=2, limited: requests.nvidia.com/gpu=3",
        QuotaError,
        "the quota gpus of the namespace is exhausted: requested requests.nvidia.com/gpu=2",
    ),
    (
        'Error from server (Forbidden): error when creating "STDIN": pods "x" is forbidden: violates PodSecurity '
        '"restricted:latest": host namespaces (hostNetwork=true), seccompProfile (pod must set it)',
        UsageError,
        "Pod Security level restricted: host namespaces",
    ),
    ('Error from server (NotFound): namespaces "x" not found', UsageError, "no namespace x"),
    ('Error from server (NotFound): pods "x" not found', NotFoundError, 'pods "x" not found'),
    ('Error from server (AlreadyExists): configmaps "x-agent" already exists', NameTakenError, "x-agent"),
    (
        "Error from server: error dialing backend: dial tcp 172.30.0.11:10250: connect: connection refused",
        NodeSilentError,
        "its kubelet does not answer: dial tcp",
    ),
    (
        "The connection to the server 172.30.0.1:6443 was refused - did you specify the right host or port?",
        UnreachableError,
        "API server does not answer",
    ),
    (
        "E1126 20:01:02.1 123 memcache.go:265] couldn't get current server API group list\n"
        "Unable to connect to the server: net/http: request canceled (Client.Timeout exceeded while awaiting headers)",
        UnreachableError,
        "API server does not answer: net/http: request canceled",
    ),
    (
        "Unable to connect to the server: dial tcp: lookup api.x on 1.1.1.1:53: no such host",
        UnreachableError,
        "host",
    ),
    ("error: something unknown", ClusterError, "kubectl: something unknown"),
]


@pytest.mark.parametrize(("stderr", "kind", "text"), ERRORS, ids=range(len(ERRORS)))
def test_each_error_is_translated(stderr, kind, text):
    error = error_of(stderr)
    assert type(error) is kind
    assert text in error.message
    assert "Error from server" not in error.message
    assert "\n" not in error.message
    assert "{" not in error.message + error.hint


def test_an_exhausted_quota_can_be_waited_for():
    assert issubclass(QuotaError, GpusHeldError)


def test_every_call_has_the_context_and_the_namespace():
    client = Kubectl("lab", "team")
    assert client.exec_argv("p", ["ls", "-l"], tty=True) == [
        *(
            "kubectl",
            "--context=lab",
            "--namespace=team",
            "exec",
            "--stdin",
            "--tty",
            "p",
            "--container=node",
        ),
        *("--", "ls", "-l"),
    ]
    assert Kubectl().argv("get", "pods") == ["kubectl", "get", "pods"]
