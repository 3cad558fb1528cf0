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
        hint = "each entry of a list such as containers, env and volumes needs its name (volumeMounts: its mountPath)"
        raise UsageError(
            f"pod: kubectl cannot merge it: {error.message.removeprefix('kubectl: ')}", hint
        ) from error
    decoder = json.JSONDecoder()
    made = []
    while text := text.strip():
        document, end = decoder.raw_decode(text)
        made.append(document)
        text = text[end:]
    for before, after in zip(pods, made, strict=True):
        _refuse_changes(before, after, node)
    return [_ordered(after, before) for before, after in zip(pods, made, strict=True)]


def _refuse_changes(before: Document, after: Document, node: str) -> None:
    """Raise UsageError if the merge has changed a field on which the launcher relies."""
    for kind in ("labels", "annotations"):
        for key, value in before["metadata"].get(kind, {}).items():
            if after["metadata"].get(kind, {}).get(key) != value:
                raise _changed(f"metadata.{kind}.{key}", f"use {kind} in the same section, with another key")
    old = before["spec"]
    new = after["spec"]
    for key, hint in _OURS.items():
        if old.get(key) != new.get(key):
            raise _changed(f"spec.{key}", hint)
    ours, theirs = (_by_key(spec.get("containers"), "spec.containers") for spec in (old, new))
    if node not in theirs:
        raise _changed(f"spec.containers.{node}", "it runs the ranks: add containers beside it")
    for key, hint in _OURS_IN_NODE.items():
        where = f"spec.containers.{node}.{key}"
        if key in ("env", "volumeMounts"):
            _refuse_changed_entries(ours[node].get(key, ()), theirs[node].get(key, ()), where, hint)
        elif ours[node].get(key) != theirs[node].get(key):
            raise _changed(where, hint)
    changed = _limits(theirs[node])
    for name, value in _limits(ours[node]).items():
        if changed.get(name) != value:
            hint = "use --gpus, and limits and devices in the same section"
            raise _changed(f"spec.containers.{node}.resources.limits.{name}", hint)
    hint = "choose another name; runs, volumes and shared_memory in the same section are for clusterctl's own"
    _refuse_changed_entries(old.get("volumes", ()), new.get("volumes", ()), "spec.volumes", hint)
    files, kept = (
        [
            _without_free(container)
            for container in _by_key(spec.get("initContainers"), "spec.initContainers").values()
        ]
        for spec in (old, new)
    )
    _refuse_changed_entries(
        files, kept, "spec.initContainers", "clusterctl uses it for the job's files: choose another name"
    )


def _refuse_changed_entries(before: Any, after: Any, where: str, hint: str) -> None:
    entries = _by_key(after, where)
    for name, entry in _by_key(before, where).items():
        if entries.get(name) != entry:
            raise _changed(f"{where}.{name}", hint)


def _changed(where: str, hint: str) -> UsageError:
    return UsageError(f"pod.{where}: clusterctl sets it", hint)


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
    if not isinstance(entries or (), list | tuple) or not all(
        isinstance(entry, dict) for entry in entries or ()
    ):
        raise UsageError(
            f"pod.{where}: must be a list of mappings", f"for example: [{{{_merge_key(where)}: ...}}]"
        )
    return {str(entry.get(_merge_key(where))): entry for entry in entries or ()}


def _ordered(after: Any, before: Any, where: str = "") -> Any:
    """Return a merged value in the order of ours, then the user's. Init containers run in order: the user's first."""
    if isinstance(after, dict) and isinstance(before, dict):
        keys = [*(key for key in before if key in after), *(key for key in after if key not in before)]
        return {key: _ordered(after[key], before.get(key), key) for key in keys}
    if not isinstance(after, list) or not isinstance(before, list):
        return after
    if not all(isinstance(item, dict) and _merge_key(where) in item for item in (*before, *after)):
        return after
    ours = _by_key(before, where)
    merged_entries = _by_key(after, where)
    first = [_ordered(merged_entries[name], entry) for name, entry in ours.items() if name in merged_entries]
    rest = [added for name, added in merged_entries.items() if name not in ours]
    return [*rest, *first] if where == "initContainers" else [*first, *rest]
