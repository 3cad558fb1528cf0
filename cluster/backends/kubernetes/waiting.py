"""What a pod says about its node: phase, exit code, and a sentence about why it waits or how it ended. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from cluster import contract
from cluster.backends.kubernetes.manifests import FILES_CONTAINER, NODE_CONTAINER
from cluster.runtimes import short_id
from cluster.spec.node_status import NodeStatus

Document = Mapping[str, Any]

#: A container image that could not be pulled so often will not come: the registry is wrong, or it cannot be reached.
PULL_TRIES = 3
#: A registry's words for an image that does not exist, or that it does not give to this cluster.
_NO_IMAGE = re.compile(
    r"not found|manifest unknown|denied|unauthorized|no basic auth|authentication required|does not exist|no match for",
    re.IGNORECASE,
)
#: Words in the events of a volume that does not come by waiting: what the pod names does not exist, or is not one.
_NO_VOLUME = re.compile(
    r"not found|type check failed|doesn't exist|does not exist|references non-existent|forbidden"
)
#: The API's words that say nothing to the reader: gRPC's frame, and the second half of newer schedulers' messages.
_NOISE = re.compile(
    r"rpc error: code = \w+ desc = |Error response from daemon: |failed to pull and unpack image \S+: | preemption: .*"
    r"|failed to create \w+ for container: |failed to create shim task: |OCI runtime create failed: "
    r"|runc create failed: |unable to start container process: |: unknown$"
)


@dataclass(frozen=True)
class PodState:
    """A node's status by its pod alone.

    `runs`: the agent in its container can be asked, and knows better. `is_final`: waiting does not help. `host` is the
    machine ("": none yet). `host_is_silent`: Kubernetes has not heard from that machine. `wants_room`: the scheduler
    finds no machine with enough free resources. `receives`: its init container waits for files. `started_at` is a Unix
    time by the machine's clock. `deleted`: why Kubernetes or a user ends the pod ("": it does not), and `grace_s` the
    time that it then has. `image_id` is what its machine took for the image's name ("": not known yet).
    """

    status: NodeStatus
    runs: bool = False
    is_final: bool = False
    host: str = ""
    host_is_silent: bool = False
    wants_room: bool = False
    receives: bool = False
    started_at: float = 0.0
    deleted: str = ""
    grace_s: int = 0
    image_id: str = ""


@dataclass(frozen=True)
class _Reason:
    """Why a container waits: the reason as the kubelet calls it, a sentence for it, and whether it mends itself.

    `{message}` are the kubelet's words. `is_final` is asked with those words, and how often it has been tried.
    """

    sentence: str
    is_final: Callable[[str, int], bool] = lambda message, tries: False


def _always(message: str, tries: int) -> bool:
    return True


def _no_image(message: str, tries: int) -> bool:
    return tries >= PULL_TRIES or bool(_NO_IMAGE.search(message))


#: The lists of a pod's containers.
_KINDS = ("initContainers", "containers")
#: What to do about machines that have different images of one name.
_SAME_IMAGE = (
    "--set image_pull_policy=Always gets the newest everywhere, --image NAME@sha256:DIGEST one and the same"
)
_IMAGE = "the container image {image} cannot be pulled: {message}"
_WAITING = {
    "InvalidImageName": _Reason("{image} is not the name of a container image: {message}", _always),
    "ErrImageNeverPull": _Reason(
        "the container image {image} is not on the machine, and image_pull_policy forbids pulling it", _always
    ),
    "ErrImagePull": _Reason(_IMAGE, _no_image),
    "ImagePullBackOff": _Reason(_IMAGE, _no_image),
    "ImageInspectError": _Reason("the container image {image} cannot be read: {message}", _always),
    "CreateContainerConfigError": _Reason("its container cannot be configured: {message}", _always),
    "CreateContainerError": _Reason("its container cannot be created: {message}", _always),
    "CrashLoopBackOff": _Reason("it exits again and again: {message}"),
    "RunContainerError": _Reason("its container cannot be started: {message}", _always),
}
#: Events that explain why a container is still being created.
_CREATING = {
    "FailedMount": _Reason(
        "a volume cannot be mounted: {message}", lambda text, _: bool(_NO_VOLUME.search(text))
    ),
    "FailedAttachVolume": _Reason("a volume cannot be attached: {message}"),
    "FailedCreatePodSandBox": _Reason("its network cannot be set up: {message}"),
}
#: How a pod ended that its container does not explain.
_ENDED = {
    "DeadlineExceeded": "it ran longer than activeDeadlineSeconds allows",
    "Evicted": "it was evicted",
    "Preempting": "it was preempted",
    "Shutdown": "its machine was shut down",
    "NodeShutdown": "its machine was shut down",
    "Terminated": "its machine was shut down",
    "NodeLost": "its machine was lost",
    "NodeAffinity": "its machine does not fit its node selector",
    "UnexpectedAdmissionError": "its machine refused it",
}
#: Reasons of the condition DisruptionTarget (Kubernetes 1.26), which says who deleted a pod, and events before that.
_DELETED = {
    "PreemptionByScheduler": "it was preempted by a pod with a higher priority",
    "Preempted": "it was preempted",
    "DeletionByTaintManager": "Kubernetes deleted it because of a taint of its machine",
    "TaintManagerEviction": "Kubernetes deleted it because of a taint of its machine",
    "EvictionByEvictionAPI": "it was evicted, for example because its machine is drained",
    "DeletionByPodGC": "Kubernetes deleted it because its machine is gone",
    "TerminationByKubelet": "its machine ended it to free resources",
    "Evicted": "it was evicted",
}
#: Reasons why a container waits that only events explain ("": none yet).
_NEED_EVENTS = ("", "ContainerCreating", "PodInitializing", "ErrImagePull", "ImagePullBackOff")
#: Messages of the event FailedMount that say nothing: the first kubelet tries again at once, the second repeats others.
_NO_REASON = re.compile("failed to sync|^Unable to attach or mount volumes")
#: How a pod ended about which Kubernetes says nothing more.
FAILED = "its pod has failed"
_OUT_OF_MEMORY = "its container ran out of memory: raise its memory limit, or use smaller batches"


def observed(node: str, pod: Document, events: Sequence[Document] = ()) -> PodState:
    """Return the state of a node by its pod, as `kubectl get` prints it, and the events about that pod.

    `needs_events` says which pods need them.
    """
    state = replace(_observed(node, pod, events), image_id=_container(pod).get("imageID", ""))
    if "deletionTimestamp" not in pod["metadata"]:
        return state
    grace_s = pod["metadata"].get("deletionGracePeriodSeconds", 0)
    return replace(state, deleted=_deletion(events) or "its pod was deleted", grace_s=grace_s)


def _observed(node: str, pod: Document, events: Sequence[Document]) -> PodState:
    phase = pod["status"].get("phase", "Pending")
    host = pod["spec"].get("nodeName", "")
    if phase in ("Succeeded", "Failed"):
        return PodState(_ended(node, pod), host=host)
    if phase == "Running" and (ended := _terminated(pod)):  # the pod's phase follows
        return PodState(_exited(node, ended, host), host=host)
    if phase == "Running" and "running" in _container(pod).get("state", {}):
        started_at = seconds(_container(pod)["state"]["running"].get("startedAt")) or 0.0
        silent = _host_is_silent(pod)
        status = NodeStatus(node, "starting", where=host)
        return PodState(status, runs=True, host=host, host_is_silent=silent, started_at=started_at)
    if phase == "Unknown":
        return PodState(NodeStatus(node, "pending", where=host), host=host, host_is_silent=True)
    return _waiting(node, pod, events, host)


def gone(node: str, events: Sequence[Document] = ()) -> NodeStatus:
    """Return the status of a node whose pod does not exist any more; `events` are those about the pod."""
    return NodeStatus(node, "lost", detail=_deletion(events) or "its pod was deleted")


def different_image(image: str, states: Sequence[PodState]) -> dict[str, NodeStatus]:
    """Return the status of each node whose container runs another image than the first node's.

    Machines name an image by the digest in a registry, or by its ID if it was loaded: only IDs of one kind compare.
    """
    images: dict[str, tuple[str, str]] = {}  # the first node with each kind of ID, and its ID
    different = {}
    for state in states:
        kind, _, digest = state.image_id.rpartition("sha256:")
        if not digest:
            continue
        first, wanted = images.setdefault(kind, (state.status.node, digest))
        if digest != wanted:
            why = f"its image {image} is {short_id(digest)}, but on {first} it is {short_id(wanted)}: {_SAME_IMAGE}"
            different[state.status.node] = _refused(state.status.node, why, state.host)
    return different


def _deletion(events: Sequence[Document]) -> str:
    """Return why Kubernetes deletes a pod, by its events; "" if they do not say."""
    for event in reversed(events):
        if event.get("reason") in _DELETED:
            return _with(_DELETED[event["reason"]], event.get("message", ""))
    return ""


def needs_events(pod: Document) -> bool:
    """Return whether only the events of a pod can say why it waits, or why it is deleted."""
    if "deletionTimestamp" in pod["metadata"]:
        return True
    if pod["status"].get("phase", "Pending") != "Pending" or not pod["spec"].get("nodeName"):
        return False
    reasons = [_reason(container) for container in _containers(pod)]
    return not reasons or any(reason in _NEED_EVENTS for reason in reasons)


def _waiting(node: str, pod: Document, events: Sequence[Document], host: str) -> PodState:
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _unscheduled(node, scheduled)
    images = {}
    for kind in _KINDS:
        for declared in pod["spec"].get(kind, ()):
            images[declared["name"]] = declared.get("image", "")
    for container in _containers(pod):
        reason = _WAITING.get(_reason(container))
        if reason is None:
            continue
        name = container["name"]
        message = container["state"]["waiting"].get("message", "")
        tries = 1
        pulls = _events(_events_of(events, name), "Failed", "Failed to pull image")
        if pulls and "Image" in _reason(container):  # ImagePullBackOff does not repeat the reason
            message = _last(pulls)
            tries = _count(pulls)
        image = images.get(name, "")
        return _state(node, reason, host, image=image, message=message, tries=tries, name=name)
    if ended := _terminated(pod):
        return PodState(_exited(node, ended, host), host=host)
    sidecars = _sidecars(pod)
    for init in pod["status"].get("initContainerStatuses", ()):
        if "running" in init.get("state", {}) and init["name"] not in sidecars:
            is_ours = init["name"] == FILES_CONTAINER
            detail = "waits for its files" if is_ours else f"its init container {init['name']} runs"
            status = NodeStatus(node, "pending", detail=detail, where=host)
            return PodState(status, host=host, receives=is_ours)
    for kind, reason in _CREATING.items():
        failures = _events(events, kind)
        telling = [event for event in failures if not _NO_REASON.search(str(event.get("message")))]
        if telling:
            return _state(node, reason, host, image="", message=_last(telling), tries=_count(telling))
    detail = "its container is being created" if host else "waits for the scheduler"
    for name, image in images.items():
        own = _events_of(events, name)
        if _events(own, "Pulling") and not _events(own, "Pulled"):
            detail = f"pulls the container image {image}"
    return PodState(NodeStatus(node, "pending", detail=detail, where=host), host=host)


def _state(
    node: str, reason: _Reason, host: str, *, image: str, message: str, tries: int, name: str = NODE_CONTAINER
) -> PodState:
    text = _NOISE.sub("", message).strip() or "no reason was given"
    sentence = reason.sentence.format(image=image, message=text)
    is_final = reason.is_final(message, tries)
    if name not in (NODE_CONTAINER, FILES_CONTAINER):
        sentence = f"its container {name}: {sentence}"
    if is_final:  # the same request would fail again
        return PodState(_refused(node, sentence, host), is_final=True, host=host)
    return PodState(NodeStatus(node, "pending", detail=sentence, where=host), host=host)


def _refused(node: str, sentence: str, host: str = "") -> NodeStatus:
    return NodeStatus(node, "exited", contract.EXIT_BAD_INPUT, sentence, where=host, is_final=True)


def _unscheduled(node: str, condition: Document) -> PodState:
    message = _NOISE.sub("", condition.get("message", "")).strip().rstrip(".")
    if condition.get("reason") == "SchedulingGated":
        queued = "waits in its queue until all pods of the job fit"
        return PodState(NodeStatus(node, "pending", detail=queued))
    if match := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
        sentence = f"the namespace has no PersistentVolumeClaim {match[1]}"
        return PodState(_refused(node, sentence), is_final=True)
    status = NodeStatus(node, "pending", detail=f"no machine is free: {message}")
    wants_room = "Insufficient" in message or "Too many pods" in message
    return PodState(status, wants_room=wants_room)


def _ended(node: str, pod: Document) -> NodeStatus:
    host = pod["spec"].get("nodeName", "")
    status = pod["status"]
    why = status.get("reason", "")
    if target := _condition(pod, "DisruptionTarget"):
        sentence = _DELETED.get(target.get("reason", ""), "Kubernetes ended it")
        return NodeStatus(node, "lost", detail=_with(sentence, target.get("message", "")), where=host)
    if why in _ENDED or why.startswith("OutOf"):
        sentence = _ENDED.get(why, f"its machine has no room for it ({why})")
        return NodeStatus(node, "lost", detail=_with(sentence, status.get("message", "")), where=host)
    if ended := _terminated(pod):
        return _exited(node, ended, host)
    if status.get("phase") == "Succeeded":
        return NodeStatus(node, "exited", 0, where=host)
    return NodeStatus(node, "lost", detail=_with(FAILED, status.get("message", "") or why), where=host)


def _terminated(pod: Document) -> Document | None:
    """Return how the node's container, or an init container that failed, ended. Sidecars do not end a node."""
    sidecars = _sidecars(pod)
    for container in (_container(pod), *pod["status"].get("initContainerStatuses", ())):
        name = container.get("name")
        ended: Document | None = container.get("state", {}).get("terminated")
        if not ended or name in sidecars:
            continue
        if name == NODE_CONTAINER or ended.get("exitCode"):
            return ended
    return None


def _exited(node: str, ended: Document, host: str) -> NodeStatus:
    code = int(ended.get("exitCode", 0))
    reason = ended.get("reason", "")
    message = _NOISE.sub("", ended.get("message", "")).strip()
    detail = ""
    if reason == "OOMKilled":
        detail = _OUT_OF_MEMORY
    elif reason in ("ContainerCannotRun", "StartError"):
        detail = _with("its command cannot be started", message)
    elif code == 137:
        detail = "its container was killed (SIGKILL)"
    elif code:
        detail = message or f"its container ended with exit code {code}"
    return NodeStatus(node, "exited", code, detail, seconds(ended.get("finishedAt")), where=host)


def seconds(text: str | None) -> float | None:
    """Return a time of the API as seconds since 1970, None for none."""
    if not text:
        return None
    return datetime.fromisoformat(f"{text[:19]}+00:00").timestamp()


def _host_is_silent(pod: Document) -> bool:
    """Return whether Kubernetes has marked the pod of a silent machine: its containers count as ready, it does not."""
    ready = _condition(pod, "Ready")
    containers = _condition(pod, "ContainersReady")
    return ready.get("status") == "False" and containers.get("status") == "True"


def _condition(pod: Document, kind: str) -> Document:
    conditions = pod["status"].get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _containers(pod: Document) -> list[Document]:
    return [*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ())]


def _sidecars(pod: Document) -> set[str]:
    """Return the names of the native sidecars (Kubernetes 1.28): init containers that run as long as the pod."""
    containers = pod["spec"].get("initContainers", ())
    return {container["name"] for container in containers if container.get("restartPolicy") == "Always"}


def _events_of(events: Sequence[Document], container: str) -> list[Document]:
    """Return the events about a container, and those that name none."""
    paths = ("", *(f"spec.{kind}{{{container}}}" for kind in _KINDS))
    return [event for event in events if event.get("involvedObject", {}).get("fieldPath", "") in paths]


def _container(pod: Document) -> Document:
    containers = pod["status"].get("containerStatuses", ())
    return next((container for container in containers if container.get("name") == NODE_CONTAINER), {})


def _reason(container: Document) -> str:
    return str(container.get("state", {}).get("waiting", {}).get("reason", ""))


def _events(events: Sequence[Document], reason: str, begin: str = "") -> list[Document]:
    """Return the events with a reason, whose messages begin with `begin`."""
    of_reason = [event for event in events if event.get("reason") == reason]
    return [event for event in of_reason if str(event.get("message", "")).startswith(begin)]


def _last(events: Sequence[Document]) -> str:
    """Return the message of the latest event, without the words that the sentence about it repeats."""
    latest = max(events, key=lambda event: event.get("lastTimestamp") or "")
    repeated = r'^Failed to pull image "[^"]*": |^MountVolume\.\w+ failed for volume ("[^"]*") : '
    return re.sub(repeated, r"\1 ", str(latest.get("message", "")))


def _count(events: Sequence[Document]) -> int:
    """Return how often the events have happened: Kubernetes counts equal ones."""
    return sum(int(event.get("count") or 1) for event in events)


def _with(sentence: str, message: str) -> str:
    return f"{sentence}: {message.strip().rstrip('.')}" if message.strip() else sentence
