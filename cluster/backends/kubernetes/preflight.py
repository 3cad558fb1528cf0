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
from cluster.backends.kubernetes.manifests import JOB_LABEL
from cluster.backends.kubernetes.options import amount
from cluster.errors import ClusterError, GpusHeldError, NameTakenError, UsageError

#: The rights that every job needs in its namespace: verb and resource.
RIGHTS = (
    *((verb, kind) for kind in ("pods", "services", "configmaps") for verb in ("create", "get", "list", "delete")),
    ("create", "pods/exec"),
    ("get", "pods/log"),
)
#: The same for a job with secrets.
SECRET_RIGHTS = (("create", "secrets"), ("delete", "secrets"))
_IN_CLUSTER_YAML = "in the section kubernetes of cluster.yaml"
_KINDS = "pods,services,configmaps"


@dataclass(frozen=True)
class Needs:
    """What a job needs of its namespace, read from the pods that its plan creates."""

    job: str
    is_first: bool
    pods: Sequence[Mapping[str, Any]]
    manifest: str
    secrets: bool

    def named(self, kind: str) -> list[str]:
        """Return the names of the objects of a kind that the pods need, and that the job does not create itself."""
        found: set[str] = set()
        for pod in self.pods:
            spec = pod["spec"]
            if kind == "persistentvolumeclaim":
                found |= {each[_CLAIM]["claimName"] for each in spec.get("volumes", ()) if _CLAIM in each}
            elif kind == "secret":
                found |= {each["secret"]["secretName"] for each in spec.get("volumes", ()) if "secret" in each}
                found |= {each["name"] for each in spec.get("imagePullSecrets", ())}
                found |= {
                    each["valueFrom"]["secretKeyRef"]["name"]
                    for container in spec["containers"]
                    for each in container.get("env", ())
                    if "secretKeyRef" in each.get("valueFrom", {})
                }
            elif kind == "priorityclass":
                found |= {spec["priorityClassName"]} if spec.get("priorityClassName") else set()
            elif kind == "serviceaccount":
                found |= {spec["serviceAccountName"]} if spec.get("serviceAccountName") else set()
        return sorted(found - {f"{self.job}-secrets"})

    @property
    def gpus(self) -> tuple[str, int]:
        """The name of the GPU resource and the number in each pod; ("", 0) for none."""
        limits = self.pods[0]["spec"]["containers"][0].get("resources", {}).get("limits", {})
        found = [(name, int(str(count))) for name, count in limits.items() if "/" in name]
        return found[0] if found else ("", 0)


_CLAIM = "persistentVolumeClaim"


def check(kubectl: Kubectl, needs: Needs) -> list[str]:
    """Raise one error for everything that the cluster lacks; return a sentence for each check that was skipped.

    Raises UsageError, else NameTakenError or GpusHeldError; UnreachableError if the API server does not answer.
    """
    _refuse_absent(kubectl)
    checks: list[Callable[[], list[str]]] = [
        lambda: _name(kubectl, needs),
        lambda: _gpus(kubectl, needs),
        lambda: _quota(kubectl, needs),
        lambda: _priority(kubectl, needs),
        lambda: _named(kubectl, needs, "persistentvolumeclaim", "PersistentVolumeClaim", "claim:"),
        lambda: _named(kubectl, needs, "secret", "Secret", "image_pull_secrets:"),
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
    kinds = (NameTakenError, GpusHeldError)
    found = [error for error in errors if isinstance(error, UsageError)]
    preflight.refuse(
        [
            next((kind for kind in kinds if isinstance(error, kind)), UsageError)(error.message, error.hint)
            for error in found
        ]
    )


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
    missing = [(verb, kind) for verb, kind in wanted if not _is_allowed(rules, verb, kind)]

    def refused(right: tuple[str, str]) -> bool:  # the list may be incomplete, for example with a webhook
        return kubectl.run("auth", "can-i", *right).out.strip() != "yes"

    with ThreadPoolExecutor(4) as pool:
        missing = [right for right, is_missing in zip(missing, pool.map(refused, missing), strict=True) if is_missing]
    if missing:
        verbs: dict[str, list[str]] = {}
        for verb, kind in missing:
            verbs.setdefault(kind, []).append(verb)
        which = "; ".join(f"{', '.join(each)} {kind}" for kind, each in verbs.items())
        where = f"the namespace {kubectl.namespace}" if kubectl.namespace else "this namespace"
        raise UsageError(f"you may not do this in {where}: {which}", RIGHTS_HINT)


def _is_allowed(rules: str, verb: str, resource: str) -> bool:
    """Return whether the output of `kubectl auth can-i --list` allows a verb for all objects of a resource."""
    for line in rules.splitlines():
        found = re.fullmatch(r"(\S*)\s+\[(.*?)\]\s+\[(.*?)\]\s+\[(.*?)\]\s*", line)
        if found and found[1] in (resource, "*.*", "*") and not found[3] and {verb, "*"} & set(found[4].split()):
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
            return [f"not checked: whether the {title} {name} exists, because you may not read it"]
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
            return [f"not checked: whether the PriorityClass {name} exists, because you may not read it"]
    return []


def _gpus(kubectl: Kubectl, needs: Needs) -> list[str]:
    """Refuse a job that the cluster could not run even if it were empty."""
    resource, count = needs.gpus
    if not resource:
        return []
    try:
        nodes = kubectl.get("nodes")
    except ForbiddenError:
        return [f"not checked: whether enough machines have {count} {resource}, because you may not list nodes"]
    selector = needs.pods[0]["spec"].get("nodeSelector", {})
    fitting = [node for node in nodes if selector.items() <= node["metadata"].get("labels", {}).items()]
    each = [int(amount(node["status"].get("allocatable", {}).get(resource, "0"))) for node in fitting]
    slots = sum(have // count for have in each)
    if slots >= len(needs.pods):
        return []
    others = sorted(
        {name for node in nodes for name in node["status"].get("allocatable", {}) if re.search(r"/.*(gpu|mig)", name)}
    )
    what = f"{len(needs.pods)} pods need {count} {resource} each"
    if not any(each):
        have = f"the cluster has {', '.join(others)}" if others else "no machine of the cluster has a GPU"
        hint = f"gpu_resource: {_IN_CLUSTER_YAML}, or --device cpu"
        raise UsageError(f"{what}, and no machine has one" + (" that fits" if selector else "") + f"; {have}", hint)
    hint = "--nodes and --gpus; kubectl describe nodes shows what each machine has"
    raise UsageError(f"{what}, and the cluster has room for {slots}, on {len(fitting)} machines", hint)


def _quota(kubectl: Kubectl, needs: Needs) -> list[str]:
    try:
        quotas = kubectl.get("resourcequotas")
    except ForbiddenError:
        return ["not checked: the quotas of the namespace, because you may not read them"]
    wanted = _requests(needs.pods)
    for quota in quotas:
        name, hard = quota["metadata"]["name"], quota.get("status", {}).get("hard", {})
        used = quota.get("status", {}).get("used", {})
        for resource, limit in hard.items():
            need, have = wanted.get(resource, Decimal(0)), amount(str(limit))
            if need > have:
                hint = "ask for more, or use fewer: --nodes, --gpus"
                raise UsageError(f"the quota {name} allows {limit} {resource}, and the job needs {_plain(need)}", hint)
            if need and need + amount(str(used.get(resource, "0"))) > have:
                why = f"the job needs {_plain(need)} {resource}, and {used[resource]} of the quota {name}'s {limit} are"
                hint = "wait until other jobs of the namespace have ended"
                raise GpusHeldError(f"{why} in use", hint)
    return []


def _requests(pods: Sequence[Mapping[str, Any]]) -> dict[str, Decimal]:
    """Return what the pods request together, by the names that quotas have."""
    found = {"pods": Decimal(len(pods)), "count/pods": Decimal(len(pods))}
    for pod in pods:
        for container in pod["spec"]["containers"]:
            resources = container.get("resources", {})
            limits, requests = resources.get("limits", {}), resources.get("requests", {})
            for prefix, values in (("limits.", limits), ("requests.", {**limits, **requests})):
                for name, value in values.items():
                    found[prefix + name] = found.get(prefix + name, Decimal(0)) + amount(str(value))
    return {**found, **{name: found[f"requests.{name}"] for name in ("cpu", "memory") if f"requests.{name}" in found}}


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}"


def _accepted(kubectl: Kubectl, needs: Needs) -> list[str]:
    """Let the server check the manifest without creating anything: its schema, admission, Pod Security."""
    kubectl.create(needs.manifest, dry_run=True)
    return []
