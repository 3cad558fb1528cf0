"""The section's key `pod`: a pod's own fields, merged into the pods of a job. What would break the launcher is refused.

kubectl merges them, without a cluster. It is Kubernetes' own implementation of the strategic merge patch and knows by
which key each list of the API merges; a table of these keys here would have to follow every version.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.backends.kubernetes import kubectl
from cluster.errors import ClusterError, UsageError

Document = dict[str, Any]

#: The pod's fields that clusterctl sets itself, and what to use instead.
_OURS = {
    "restartPolicy": "clusterctl restarts a job as a whole: --max-restarts",
    "hostname": "the pods find each other by it: omit it",
    "subdomain": "the pods find each other by it: omit it",
    "terminationGracePeriodSeconds": "use --grace",
    "hostNetwork": "use host_network: true in the same section",
    "automountServiceAccountToken": "mount a token as a projected volume",
}
#: The same for the container of the ranks. In a list of the API, the entries that are clusterctl's.
_OURS_IN_NODE = {
    "image": "use --image",
    "command": "use --command; a program around the ranks belongs in the image's entrypoint",
    "args": "use --command",
    "workingDir": "use --workdir",
    "env": "use --env",
    "volumeMounts": "choose another path",
}
#: What an init container that waits for files may get.
_FREE_IN_FILES = ("resources", "securityContext", "imagePullPolicy", "env")
#: The key by which the entries of these lists merge; all others merge by their name.
_MERGE_KEYS = {"volumeMounts": "mountPath"}


def merged(pods: Sequence[Document], patch: Mapping[str, Any], node: str) -> list[Document]:
    """Return the pods with the user's fields. `node` is the name of the ranks' container. Raises UsageError."""
    if problem := kubectl.problem():
        raise UsageError(*problem)
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    words = ("--local", "--type=strategic", "--filename=-", "--output=json", f"--patch={json.dumps(patch)}")
    try:
        text = kubectl.Kubectl().text("patch", *words, stdin=items)
    except ClusterError as error:
        why = error.message.removeprefix("kubectl: ")
        hint = "each entry of a list such as containers, env and volumes needs its name (volumeMounts: its mountPath)"
        raise UsageError(f"pod: kubectl cannot merge it: {why}", hint) from error
    patched = _parsed(text)
    for before, after in zip(pods, patched, strict=True):
        _refuse_changes(before, after, node)
    return [_ordered(after, before) for before, after in zip(pods, patched, strict=True)]


def _parsed(text: str) -> list[Document]:
    """Return the documents of a JSON stream, which is how kubectl prints several objects."""
    decoder = json.JSONDecoder()
    documents = []
    while text := text.strip():
        document, end = decoder.raw_decode(text)
        documents.append(document)
        text = text[end:]
    return documents


def _refuse_changes(before: Document, after: Document, node: str) -> None:
    """Raise UsageError if the merge has changed a field on which the launcher relies."""
    _refuse_changed_metadata(before["metadata"], after["metadata"])
    ours = before["spec"]
    theirs = after["spec"]
    for key, hint in _OURS.items():
        if ours.get(key) != theirs.get(key):
            raise _changed(f"spec.{key}", hint)
    _refuse_changed_node(ours, theirs, node)
    hint = "choose another name; runs, volumes and shared_memory in the same section are for clusterctl's own"
    _refuse_changed_entries(ours.get("volumes", ()), theirs.get("volumes", ()), "spec.volumes", hint)
    hint = "clusterctl uses it for the job's files: choose another name"
    _refuse_changed_entries(_init_containers(ours), _init_containers(theirs), "spec.initContainers", hint)


def _refuse_changed_metadata(ours: Document, theirs: Document) -> None:
    for kind in ("labels", "annotations"):
        merged_values = theirs.get(kind, {})
        for key, value in ours.get(kind, {}).items():
            if merged_values.get(key) != value:
                raise _changed(f"metadata.{kind}.{key}", f"use {kind} in the same section, with another key")


def _refuse_changed_node(our_spec: Document, their_spec: Document, node: str) -> None:
    """Raise UsageError if the container of the ranks has gone, or has lost something that clusterctl sets."""
    where = f"spec.containers.{node}"
    ours = _by_key(our_spec.get("containers"), "spec.containers")[node]
    theirs = _by_key(their_spec.get("containers"), "spec.containers").get(node)
    if theirs is None:
        raise _changed(where, "it runs the ranks: add containers beside it")
    for key, hint in _OURS_IN_NODE.items():
        if key in ("env", "volumeMounts"):
            _refuse_changed_entries(ours.get(key, ()), theirs.get(key, ()), f"{where}.{key}", hint)
        elif ours.get(key) != theirs.get(key):
            raise _changed(f"{where}.{key}", hint)
    their_limits = _limits(theirs)
    for name, value in _limits(ours).items():
        if their_limits.get(name) != value:
            hint = "use --gpus, and limits and devices in the same section"
            raise _changed(f"{where}.resources.limits.{name}", hint)


def _refuse_changed_entries(ours: Any, theirs: Any, where: str, hint: str) -> None:
    merged_entries = _by_key(theirs, where)
    for name, entry in _by_key(ours, where).items():
        if merged_entries.get(name) != entry:
            raise _changed(f"{where}.{name}", hint)


def _changed(where: str, hint: str) -> UsageError:
    return UsageError(f"pod.{where}: clusterctl sets it", hint)


def _init_containers(spec: Document) -> list[Document]:
    """Return the init containers, without what the user may set in them."""
    containers = _by_key(spec.get("initContainers"), "spec.initContainers").values()
    return [_without_free(container) for container in containers]


def _without_free(container: Document) -> Document:
    return {key: value for key, value in container.items() if key not in _FREE_IN_FILES}


def _limits(container: Document) -> Document:
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    return limits if isinstance(limits, dict) else {}


def _merge_key(where: str) -> str:
    return _MERGE_KEYS.get(where.rpartition(".")[2], "name")


def _by_key(entries: Any, where: str) -> dict[str, Document]:
    """Return the entries of a list by the key by which they merge. Raise UsageError if it is no list of mappings."""
    key = _merge_key(where)
    entries = entries or ()
    is_list = isinstance(entries, list | tuple)
    if not is_list or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"pod.{where}: must be a list of mappings", f"for example: [{{{key}: ...}}]")
    return {str(entry.get(key)): entry for entry in entries}


def _ordered(after: Any, before: Any, where: str = "") -> Any:
    """Return a merged value in the order of ours, then the user's. Init containers run in order: the user's first."""
    if isinstance(after, dict) and isinstance(before, dict):
        kept_keys = [key for key in before if key in after]
        added_keys = [key for key in after if key not in before]
        return {key: _ordered(after[key], before.get(key), key) for key in (*kept_keys, *added_keys)}
    if not isinstance(after, list) or not isinstance(before, list):
        return after
    merge_key = _merge_key(where)
    if not all(isinstance(item, dict) and merge_key in item for item in (*before, *after)):
        return after
    ours = _by_key(before, where)
    theirs = _by_key(after, where)
    kept = [_ordered(theirs[name], entry) for name, entry in ours.items() if name in theirs]
    added = [entry for name, entry in theirs.items() if name not in ours]
    return [*added, *kept] if where == "initContainers" else [*kept, *added]
