"""Preflight check of a job on Kubernetes: rights, namespace, what the pods name, GPUs, quota, and the server's check.

Nothing is created. What the user may not read is skipped; the server's check of the manifest finds the rest.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from cluster.backends import preflight
from cluster.backends.kubernetes.kubectl import RIGHTS_HINT, ForbiddenError, Kubectl, NotFoundError
from cluster.backends.kubernetes.manifests import JOB_LABEL, NODE_CONTAINER
from cluster.backends.kubernetes.options import amount
from cluster.errors import ClusterError, GpusHeldError, NameTakenError, UsageError

#: The rights that every job needs in its namespace: verb and resource.
RIGHTS = (
    *(
        (verb, kind)
        for kind in ("pods", "services", "configmaps")
        for verb in ("create", "get", "list", "delete")
    ),
    ("create", "pods/exec"),
    ("get", "pods/log"),
)
#: The same for a job with secrets.
SECRET_RIGHTS = (("create", "secrets"), ("delete", "secrets"))
_IN_CLUSTER_YAML = "in the section kubernetes of cluster.yaml"
_KINDS = "pods,services,configmaps"
#: What is in the names of GPUs and of other accelerators on which a job could run.
_GPU = r"gpu|/mig-|gaudi|/neuron|/tpu|/npu|\.intel\.com/(i915|xe)"


@dataclass(frozen=True)
class Needs:
    """What a job needs of its namespace, read from the pods that its plan creates."""

    job: str
    is_first: bool
    pods: Sequence[Mapping[str, Any]]
    manifest: str
    secrets: bool
    #: The resource of which --gpus is the number.
    gpu_resource: str = ""
    #: The names of the ConfigMaps that the plan creates.
    own: frozenset[str] = frozenset()

    def named(self, kind: str) -> list[str]:
        """Return the names of the objects of a kind that the pods need, and that the job does not create itself."""
        names: set[str] = set()
        for pod in self.pods:
            spec = pod["spec"]
            if kind == "persistentvolumeclaim":
                volumes = spec.get("volumes", ())
                names |= {volume[_CLAIM]["claimName"] for volume in volumes if _CLAIM in volume}
            elif kind in ("secret", "configmap"):
                names |= _referred(spec, kind)
            elif kind == "priorityclass":
                names.add(spec.get("priorityClassName") or "")
            elif kind == "serviceaccount":
                names.add(spec.get("serviceAccountName") or "")
        return sorted(names - {"", f"{self.job}-secrets"} - self.own)

    @property
    def devices(self) -> dict[str, int]:
        """The devices that a pod's node container asks for, by their resource; its GPUs first."""
        containers = self.pods[0]["spec"]["containers"]
        (node,) = (container for container in containers if container["name"] == NODE_CONTAINER)
        limits = node.get("resources", {}).get("limits", {})
        counts = {name: int(amount(str(count))) for name, count in limits.items() if "/" in name}
        return dict(sorted(counts.items(), key=lambda item: item[0] != self.gpu_resource))


_CLAIM = "persistentVolumeClaim"


def _referred(spec: Mapping[str, Any], kind: str) -> set[str]:
    """Return the names of the Secrets or ConfigMaps without which the pod's containers do not start."""
    refs = list(spec.get("imagePullSecrets", ())) if kind == "secret" else []
    word = "secret" if kind == "secret" else "configMap"
    for volume in spec.get("volumes", ()):
        for source in (volume, *volume.get("projected", {}).get("sources", ())):
            if word in source:
                refs.append({"name": source[word].get("secretName"), **source[word]})
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        refs += [source[f"{word}Ref"] for source in container.get("envFrom", ()) if f"{word}Ref" in source]
        sources = [variable.get("valueFrom", {}) for variable in container.get("env", ())]
        refs += [source[f"{word}KeyRef"] for source in sources if f"{word}KeyRef" in source]
    needed = [reference for reference in refs if not reference.get("optional")]
    return {str(reference["name"]) for reference in needed if reference.get("name")}


def check(kubectl: Kubectl, needs: Needs) -> list[str]:
    """Raise one error for everything that the cluster lacks; return warnings, and a sentence for each skipped check.

    Raises UsageError, else NameTakenError or GpusHeldError; UnreachableError if the API server does not answer.
    """
    _refuse_absent(kubectl)
    checks: list[Callable[[], list[str]]] = [
        lambda: _name(kubectl, needs),
        lambda: _devices(kubectl, needs),
        lambda: _quota(kubectl, needs),
        lambda: _priority(kubectl, needs),
        lambda: _claims(kubectl, needs),
        lambda: _named(kubectl, needs, "secret", "Secret", "image_pull_secrets: or pod:"),
        lambda: _named(kubectl, needs, "configmap", "ConfigMap", "pod:"),
        lambda: _named(kubectl, needs, "serviceaccount", "ServiceAccount", "service_account:"),
    ]
    _rights(kubectl, needs)  # first: without them the others fail, too
    skipped, errors = _all(checks)
    if not errors:
        skipped += _accepted(kubectl, needs)
    _raise(errors)
    return skipped


def _all(checks: Sequence[Callable[[], list[str]]]) -> tuple[list[str], list[ClusterError]]:
    """Run checks in parallel. Return their sentences, and the errors that they raised."""

    def run(one: Callable[[], list[str]]) -> list[str] | ClusterError:
        try:
            return one()
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(checks)) as pool:
        results = list(pool.map(run, checks))
    errors = [result for result in results if isinstance(result, ClusterError)]
    return [text for result in results if isinstance(result, list) for text in result], errors


def _raise(errors: Sequence[ClusterError]) -> None:
    for error in errors:
        if not isinstance(error, UsageError):
            raise error
    preflight.refuse([_generalized(error) for error in errors])


def _generalized(error: ClusterError) -> UsageError:
    """Return the error as one of the kinds that `preflight.refuse` joins; kubectl's are subclasses of them."""
    for kind in (NameTakenError, GpusHeldError):
        if isinstance(error, kind):
            return kind(error.message, error.hint)
    return UsageError(error.message, error.hint)


def _refuse_absent(kubectl: Kubectl) -> None:
    """Raise UsageError if the namespace does not exist: each other check would fail for that reason."""
    try:
        kubectl.get("pods", f"--selector={JOB_LABEL}=")
    except ForbiddenError:
        return  # the rights say it better
    if kubectl.namespace:
        try:
            kubectl.get("namespace", kubectl.namespace)
        except ForbiddenError:
            return  # a namespace that does not exist cannot be distinguished from one that may not be read
        except NotFoundError as error:
            hint = f"namespace: {_IN_CLUSTER_YAML}, or: kubectl create namespace {kubectl.namespace}"
            raise UsageError(f"the cluster has no namespace {kubectl.namespace}", hint) from error


def _rights(kubectl: Kubectl, needs: Needs) -> None:
    wanted = [*RIGHTS, *(SECRET_RIGHTS if needs.secrets else ())]
    rules = kubectl.text("auth", "can-i", "--list", "--no-headers")
    unlisted = [(verb, kind) for verb, kind in wanted if not _is_allowed(rules, verb, kind)]

    def refused(right: tuple[str, str]) -> bool:  # the list may be incomplete, for example with a webhook
        return kubectl.run("auth", "can-i", *right).out.strip() != "yes"

    with ThreadPoolExecutor(4) as pool:
        are_refused = list(pool.map(refused, unlisted))
    verbs: dict[str, list[str]] = {}
    for (verb, kind), is_refused in zip(unlisted, are_refused, strict=True):
        if is_refused:
            verbs.setdefault(kind, []).append(verb)
    if verbs:
        which = "; ".join(f"{', '.join(names)} {kind}" for kind, names in verbs.items())
        where = f"the namespace {kubectl.namespace}" if kubectl.namespace else "this namespace"
        raise UsageError(f"missing permissions in {where}: {which}", RIGHTS_HINT)


def _is_allowed(rules: str, verb: str, resource: str) -> bool:
    """Return whether the output of `kubectl auth can-i --list` allows a verb for all objects of a resource."""
    for line in rules.splitlines():
        match = re.fullmatch(r"(\S*)\s+\[(.*?)\]\s+\[(.*?)\]\s+\[(.*?)\]\s*", line)
        if not match:
            continue
        resources, _, names, verbs = match.groups()
        is_for_all = resources in (resource, "*.*", "*") and not names
        if is_for_all and {verb, "*"} & set(verbs.split()):
            return True
    return False


def _name(kubectl: Kubectl, needs: Needs) -> list[str]:
    if not needs.is_first:
        return []
    left = kubectl.text("get", _KINDS, f"--selector={JOB_LABEL}={needs.job}", "--output=name").split()
    if left:
        raise preflight.name_taken(needs.job, f"namespace {kubectl.namespace or 'of the context'}", left[0])
    return []


def _named(kubectl: Kubectl, needs: Needs, kind: str, title: str, option: str) -> list[str]:
    missing = []
    for name in needs.named(kind):
        try:
            kubectl.get(kind, name)
        except NotFoundError:
            missing.append(name)
        except ForbiddenError:
            return [
                f"not checked: whether the {title} {name} exists, because you have no permission to read it"
            ]
    if missing:
        hint = f"{option} {_IN_CLUSTER_YAML}; kubectl get {kind} lists those that exist"
        raise UsageError(f"the namespace has no {title} {', '.join(missing)}", hint)
    return []


def _priority(kubectl: Kubectl, needs: Needs) -> list[str]:
    for name in needs.named("priorityclass"):
        try:
            kubectl.get("priorityclass", name)
        except NotFoundError as error:
            hint = f"priority_class: {_IN_CLUSTER_YAML}; kubectl get priorityclass lists those that exist"
            raise UsageError(f"the cluster has no PriorityClass {name}", hint) from error
        except ForbiddenError:
            return [
                f"not checked: whether the PriorityClass {name} exists, because you have no permission to read it"
            ]
    return []


def _devices(kubectl: Kubectl, needs: Needs) -> list[str]:
    """Refuse a job whose GPUs and other devices the cluster would not have even if it were empty."""
    wanted = needs.devices
    if not wanted:
        return []
    of_each = " and ".join(f"{count} {resource}" for resource, count in wanted.items())
    try:
        nodes = kubectl.get("nodes")
    except ForbiddenError:
        return [f"not checked: whether enough machines have {of_each}, because you may not list nodes"]
    selector = needs.pods[0]["spec"].get("nodeSelector", {})
    fitting = [node for node in nodes if selector.items() <= node["metadata"].get("labels", {}).items()]
    have = [{name: _allocatable(node, name) for name in wanted} for node in fitting]
    slots = 0
    for counts in have:
        slots += min(counts[name] // count for name, count in wanted.items())
    if slots >= len(needs.pods):
        return []
    what = f"{len(needs.pods)} pods need {of_each} each"
    for resource in wanted:
        if any(counts[resource] for counts in have):
            continue
        hint = f"devices: {_IN_CLUSTER_YAML}"
        if resource == needs.gpu_resource:
            hint = f"gpu_resource: {_IN_CLUSTER_YAML}, or --device cpu"
        which = "one" if len(wanted) == 1 else resource
        which += " that fits" if selector else ""
        raise UsageError(f"{what}, but no machine has {which}; {_instead_of(resource, needs, nodes)}", hint)
    hint = "--nodes and --gpus; kubectl describe nodes shows what each machine has"
    raise UsageError(f"{what}, but the cluster has room for {slots}, on {len(fitting)} machines", hint)


def _instead_of(resource: str, needs: Needs, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the devices of the same kind, GPUs or others, that the cluster has instead of a resource."""
    is_gpu = resource == needs.gpu_resource
    devices = {name for node in nodes for name in node["status"].get("allocatable", {}) if "/" in name}
    others = sorted(name for name in devices - set(needs.devices) if bool(re.search(_GPU, name)) == is_gpu)
    if others:
        return f"the cluster has {', '.join(others)}"
    return f"no machine of the cluster has a {'GPU' if is_gpu else resource}"


def _allocatable(node: Mapping[str, Any], resource: str) -> int:
    return int(amount(str(node["status"].get("allocatable", {}).get(resource, "0"))))


def _claims(kubectl: Kubectl, needs: Needs) -> list[str]:
    """Refuse missing claims, and those for one pod; return a sentence for each that only one machine can mount."""
    notes = []
    missing = []
    single = []
    for name in needs.named("persistentvolumeclaim"):
        try:
            (claim,) = kubectl.get("persistentvolumeclaim", name)
        except NotFoundError:
            missing.append(name)
            continue
        except ForbiddenError:
            notes.append(
                f"not checked: the PersistentVolumeClaim {name}, because you have no permission to read it"
            )
            continue
        modes = set(claim["spec"].get("accessModes", ()))
        if len(needs.pods) == 1 or modes & {"ReadWriteMany", "ReadOnlyMany"}:
            continue
        if "ReadWriteOnce" in modes:
            notes.append(
                f"PersistentVolumeClaim {name}: its access mode is ReadWriteOnce, so only pods on one machine can "
                "mount it, and the others wait; use a claim with ReadWriteMany"
            )
        elif "ReadWriteOncePod" in modes:
            single.append(name)
    if missing:
        hint = f"claim: {_IN_CLUSTER_YAML}; kubectl get persistentvolumeclaim lists those that exist"
        raise UsageError(f"the namespace has no PersistentVolumeClaim {', '.join(missing)}", hint)
    if single:
        which = f"PersistentVolumeClaim {', '.join(single)}"
        why = f"its access mode is ReadWriteOncePod, so only one of the job's {len(needs.pods)} pods can mount it"
        raise UsageError(f"{which}: {why}", "use a claim with ReadWriteMany, or --nodes 1")
    return notes


def _quota(kubectl: Kubectl, needs: Needs) -> list[str]:
    try:
        quotas = kubectl.get("resourcequotas")
    except ForbiddenError:
        return ["not checked: the quotas of the namespace, because you may not read them"]
    wanted = _requests(needs.pods)
    for quota in quotas:
        name = quota["metadata"]["name"]
        hard = quota.get("status", {}).get("hard", {})
        used = quota.get("status", {}).get("used", {})
        for resource, limit in hard.items():
            need = wanted.get(resource, Decimal(0))
            have = amount(str(limit))
            if need > have:
                why = f"the quota {name} allows {limit} {resource}, but the job needs {_plain(need)}"
                raise UsageError(why, "ask for more, or use fewer: --nodes, --gpus")
            if need and need + amount(str(used.get(resource, "0"))) > have:
                in_use = f"{used[resource]} of the quota {name}'s {limit} are in use"
                hint = "wait until other jobs of the namespace have ended"
                raise GpusHeldError(f"the job needs {_plain(need)} {resource}, but {in_use}", hint)
    return []


def _requests(pods: Sequence[Mapping[str, Any]]) -> dict[str, Decimal]:
    """Return what the pods request together, by the names that quotas have."""
    totals = {"pods": Decimal(len(pods)), "count/pods": Decimal(len(pods))}
    for pod in pods:
        for container in pod["spec"]["containers"]:
            resources = container.get("resources", {})
            limits = resources.get("limits", {})
            requests = resources.get("requests", {})
            for prefix, values in (("limits.", limits), ("requests.", {**limits, **requests})):
                for name, value in values.items():
                    totals[prefix + name] = totals.get(prefix + name, Decimal(0)) + amount(str(value))
    # A quota may also call the requests of these by their plain names.
    for name in ("cpu", "memory"):
        if f"requests.{name}" in totals:
            totals[name] = totals[f"requests.{name}"]
    return totals


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}"


def _accepted(kubectl: Kubectl, needs: Needs) -> list[str]:
    """Let the server check the manifest without creating anything: its schema, admission, Pod Security."""
    kubectl.create(needs.manifest, dry_run=True)
    return []
