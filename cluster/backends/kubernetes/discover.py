"""What `clusterctl init` finds in a cluster: context and namespace, the resource of its GPUs, a volume for results."""

import json
from typing import Any

from cluster.backends.kubernetes.kubectl import Kubectl
from cluster.errors import ClusterError
from cluster.spec.counts import counted

#: The resources of GPUs that device plugins provide: whole GPUs, or MIG slices.
_GPUS = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "nvidia.com/mig-")


def settings() -> tuple[dict[str, Any], list[str]]:
    """Return the section `kubernetes` for the current context of the kubeconfig, and what was found, as sentences.

    Raises UsageError without a kubeconfig, UnreachableError if the API server does not answer.
    """
    client = Kubectl()
    view = json.loads(client.text("config", "view", "--minify", "--output=json"))
    (current,) = view["contexts"]
    context = current["name"]
    namespace = current["context"].get("namespace") or "default"
    client.text("get", "pods", "--output=name")  # the cluster answers, and accepts the user
    section: dict[str, Any] = {"context": context, "namespace": namespace}
    resource, notes = _gpus(client)
    if resource:
        section["gpu_resource"] = resource
    claims, more = _shared_claims(client)
    if len(claims) == 1:
        section["runs"] = {"claim": claims[0]}
    return section, [f"context {context}, namespace {namespace}", *notes, *more]


def _gpus(client: Kubectl) -> tuple[str, list[str]]:
    """Return the most frequent resource of GPUs, and sentences."""
    try:
        nodes = client.get("nodes")
    except ClusterError as error:
        why = f"{error.message}; if the cluster has none: device: cpu"
        return _GPUS[0], [f"GPUs: {_GPUS[0]}, unless you name another gpu_resource: {why}"]
    counts: dict[str, list[int]] = {}
    for node in nodes:
        for name, number in node["status"].get("allocatable", {}).items():
            count = int(number) if str(number).isdigit() else 0
            if count and name.startswith(_GPUS):
                counts.setdefault(name, []).append(count)
    if not counts:
        return "", [f"{counted(len(nodes), 'node')}, none with a GPU that pods may use"]
    best = max(counts, key=lambda name: sum(counts[name]))
    lines = [
        f"{sum(gpus)} x {name} on {len(gpus)} of {counted(len(nodes), 'node')}"
        for name, gpus in counts.items()
    ]
    return best, lines


def _shared_claims(client: Kubectl) -> tuple[list[str], list[str]]:
    """Return the PersistentVolumeClaims that several pods can write at once, and sentences."""
    try:
        claims = client.get("persistentvolumeclaims")
    except ClusterError as error:
        return [], [f"volumes: not known ({error.message}); set runs: {{claim: NAME}}"]
    shared = []
    for claim in claims:
        if "ReadWriteMany" in claim["spec"].get("accessModes", ()):
            shared.append(claim["metadata"]["name"])
    if not shared:
        return [], ["no PersistentVolumeClaim that all pods can mount: checkpoints disappear with their pod"]
    if len(shared) > 1:
        names = ", ".join(shared)
        return shared, [f"choose one for checkpoints and results: runs: {{claim: NAME}}, of {names}"]
    return shared, [f"checkpoints and results are kept in the PersistentVolumeClaim {shared[0]}"]
