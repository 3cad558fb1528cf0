"""The manifest of an attempt: its agent, a Service by which the pods find each other, and one pod per node. Pure.

It works without the launcher (`kubectl create -f FILE`), unless the pods need files or secrets of this machine: then
the comment at its top has the commands that send them.
"""

import base64
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster import contract
from cluster.agent import scripts
from cluster.backends import script
from cluster.backends.kubernetes.options import Options, SecurityContext
from cluster.errors import UsageError, near_or_all
from cluster.spec.model import WORKDIR, Job, Node, Plan, Step, nodes_of
from cluster.spec.mount import Mount
from cluster.spec.schema import Source, model_at

Document = dict[str, Any]
#: Merges fields into pods, in which a container has this name.
Merge = Callable[[Sequence[Document], Mapping[str, Any], str], list[Document]]

#: The labels of all objects of a job, of those of an attempt, and of a node's pod. The launch ID finds them. Names are
#: for people, who may use one again.
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB_LABEL = "clusterctl/job"
LAUNCH_LABEL = "clusterctl/launch"
ATTEMPT_LABEL = "clusterctl/attempt"
RANK_LABEL = "clusterctl/rank"
#: The label of who has launched them, which the launcher adds: a plan does not depend on who prints it.
USER_LABEL = "clusterctl/user"
#: The folder of the jobs' run directories in the containers.
RUNS = "/runs"
#: The container of a node's ranks, and the init container that waits for files of the launching machine.
NODE_CONTAINER = "node"
FILES_CONTAINER = "files"
#: The volume of the run directories.
RUNS_VOLUME = "runs"
#: The volume of those files, where the init container has it, and the file that says that all have arrived.
INPUTS_VOLUME = "inputs"
INPUTS = "/inputs"
COMPLETE = f"{INPUTS}/.complete"

_AGENT_FOLDER = "/clusterctl"
_AGENT = f"{_AGENT_FOLDER}/agent.pyz"
#: Seconds for which a container stays after its ranks have exited, so that the launcher can copy its files, by whether
#: they would otherwise be lost.
_HOLD_S = {True: 600, False: 120}
#: The settings that are mappings: `limits.memory` is a key in one of them.
_NESTED = (
    "pod",
    "runs",
    "requests",
    "limits",
    "devices",
    "node_selector",
    "security_context",
    "labels",
    "annotations",
)
#: Without the trap, a shell with process ID 1 ignores SIGTERM.
_WAIT = f"trap 'exit 143' TERM; until [ -e {COMPLETE} ]; do sleep 0.2; done"
#: As _WAIT, and until the first pod has filled the folder that all share: then the same text is in both files.
SENT = ".clusterctl-sent"
_WAIT_FOR_ALL = (
    f"trap 'exit 143' TERM; until [ -e {COMPLETE} ] && [ \"$(cat {COMPLETE})\" = "
    '"$(cat {sent} 2>/dev/null)" ]; do sleep 0.2; done'
)
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
_GROUP_RETRIES = "kueue.x-k8s.io/retriable-in-group"


def plan(job: Job, *, attempt: int, port: int, merge: Merge) -> Plan:
    """Return a plan with one step: the manifest, and the command that creates its objects. Raises UsageError.

    `merge` returns the pods with the section's key `pod`: `template.merged`, which runs kubectl.
    """
    assert job.queue is not None
    options = options_of(job)
    nodes = nodes_of(job, job.queue.login)
    made = Plan(job, attempt, "kubernetes", nodes, master(job, attempt), port)
    file = f"{made.attempt_dir}/pods.yaml"
    head = comment(job, options, attempt=attempt)
    text = render(documents(job, options, attempt=attempt, port=port, merge=merge), head)
    return replace(made, steps=(Step("kubernetes", {file: text}, (*kubectl(options), "create", "-f", file)),))


def settings(listed: Mapping[str, Any], given: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the section `kubernetes` with the settings of the command line, by keys such as `limits.memory`.

    Their values are YAML; an empty one, or null, unsets the key. Raises UsageError for an invalid one.
    """
    from pydantic import ValidationError

    merged: dict[str, Any] = dict(listed)
    for key, text in given.items():
        try:
            value = Source(text, key).data  # texts stay texts, as in cluster.yaml
        except UsageError as error:
            raise UsageError(f"--set {key}={text}: not YAML", "quote it as for a shell") from error
        *outer, last = words_of(key)
        inner = merged
        for word in outer:
            below = inner.get(word) or {}
            if not isinstance(below, dict):
                raise UsageError(f"--set {key}: {word} has no keys", f"set it as a whole: --set {word}=VALUE")
            inner[word] = dict(below)
            inner = inner[word]
        inner[last] = value
        if value is None and last in (_keys_at(outer) or inner):
            del inner[last]
    try:
        made = Options.model_validate(merged)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0], list(given)) from None
    return made.model_dump(mode="json", exclude_defaults=True)


def _invalid(error: Mapping[str, Any], given: Sequence[str]) -> UsageError:
    """Return the error for a setting of the command line that pydantic refuses; `given` are the keys of all."""
    place = ".".join(map(str, error["loc"])) or " --set ".join(
        given
    )  # settings that contradict each other have none
    option = f"--set {place}"
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, UsageError):
        return UsageError(f"{option}: {raised.message}", raised.hint)
    if error["type"] == "extra_forbidden":
        *above, wrong = error["loc"]
        hint = near_or_all(str(wrong), list(model_at(Options, above).model_fields))
        return UsageError(f"{option}: unknown key", hint)
    if error["type"] in ("dict_type", "model_type"):
        return UsageError(f"{option}: must be keys and values", f"for example: {option}.key=value")
    message = error["msg"]
    return UsageError(f"{option}: {message[0].lower()}{message[1:]}")


def words_of(key: str) -> list[str]:
    """Return the path that a key of --set names. A dot in a word below `pod` is written as `\\.`."""
    outer, _, _ = key.partition(".")
    if outer == "pod":
        return [word.replace("\\.", ".") for word in re.split(r"(?<!\\)\.", key)]
    return key.split(".", 1) if outer in _NESTED else [key]


def _keys_at(outer: Sequence[str]) -> list[str] | None:
    """Return the keys of a mapping in the section, None for one that takes any."""
    models = [model_at(Options, outer[:end]) for end in range(len(outer) + 1)]
    return list(models[-1].model_fields) if len({*models}) == len(models) else None


def options_of(job: Job) -> Options:
    """Return the section `kubernetes` of a job."""
    assert job.queue is not None
    return Options.model_validate(dict(job.queue.settings))


def kubectl(options: Options) -> tuple[str, ...]:
    """Return the beginning of a command of kubectl, with the context and the namespace of the job."""
    context = [f"--context={options.context}"] if options.context else []
    namespace = [f"--namespace={options.namespace}"] if options.namespace else []
    return ("kubectl", *context, *namespace)


def documents(job: Job, options: Options, *, attempt: int, port: int, merge: Merge) -> list[Document]:
    """Return the objects of an attempt, in the order in which they are created. Raises UsageError."""
    if job.name.endswith("-"):
        raise UsageError(
            f"--name {job.name}: names of Kubernetes end with a letter or digit", "omit the last '-'"
        )
    service = _object("Service", service_name(job, attempt), options, labels(job, attempt))
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # the ranks need the names before they are ready
        "selector": {LAUNCH_LABEL: job.launch_id, ATTEMPT_LABEL: str(attempt)},
        "ports": [{"name": "rendezvous", "port": port}],
    }
    agent = _object("ConfigMap", agent_name(job, attempt), options, labels(job, attempt))
    archive = base64.b64encode(scripts.archive()).decode()
    # in lines, as kubectl itself prints it
    agent["binaryData"] = {"agent.pyz": textwrap.fill(archive, 120) + "\n"}
    pods = [_pod(job, options, rank, attempt=attempt, port=port) for rank in range(job.nodes)]
    patch = options.pod.model_dump(mode="json", exclude_defaults=True)
    if patch:
        pods = merge(pods, patch, NODE_CONTAINER)
    return [agent, service, *pods]


def secret(job: Job, options: Options, values: Mapping[str, str]) -> Document:
    """Return the Secret with the values of the job's secrets, to which the pods refer. No plan contains it."""
    made = _object("Secret", f"{job.name}-secrets", options, labels(job))
    data = {}
    for name in job.secrets:
        value = values[name].encode(errors="surrogateescape")
        data[name] = base64.b64encode(value).decode()
    return {**made, "type": "Opaque", "data": data}


def labels(job: Job, attempt: int = 0) -> dict[str, str]:
    """Return the labels by which the objects of a job are found, or those of one attempt."""
    of_job = {MANAGED_BY: "clusterctl", JOB_LABEL: job.name, LAUNCH_LABEL: job.launch_id}
    return {**of_job, ATTEMPT_LABEL: str(attempt)} if attempt else of_job


def launched_by(document: Document, user: str) -> Document:
    """Return an object with the label of who has launched it."""
    metadata = document["metadata"]
    labelled = {**metadata, "labels": {**metadata["labels"], USER_LABEL: user}}
    return {**document, "metadata": labelled}


def user_label(name: str, number: int) -> str:
    """Return the label of a user of the launching machine: `ann.1000`, of characters that a label may have."""
    word = re.sub(r"[^A-Za-z0-9_.-]", "_", name).strip("_.-")[:40]
    return f"{word}.{number}" if word else str(number)


def pod_name(job: Job, attempt: int, rank: int) -> str:
    """Return the name of a node's pod, which is also its host name."""
    return f"{job.name}-a{attempt}-{rank}"


def pod_of(plan: Plan, node: Node) -> str:
    """Return the name of a node's pod. A plan may have only some of the job's nodes: their order is not the rank."""
    return pod_name(plan.job, plan.attempt, int(node.name.removeprefix("node-")))


def agent_name(job: Job, attempt: int) -> str:
    """Return the name of an attempt's ConfigMap. Each has its own: kubelets cache one of the same name."""
    return f"{job.name}-a{attempt}-agent"


def service_name(job: Job, attempt: int) -> str:
    """Return the name of an attempt's Service. Unlike that of a job or pod, it cannot begin with a digit."""
    prefix = "" if job.name[0].isalpha() else "job-"
    return f"{prefix}{job.name}-a{attempt}"


def master(job: Job, attempt: int) -> str:
    """Return the name that all pods of an attempt resolve to the address of the first."""
    return f"{pod_name(job, attempt, 0)}.{service_name(job, attempt)}"


def inputs(job: Job) -> tuple[Mount, ...]:
    """Return the files and folders of this machine that the launcher copies to the pods."""
    workdir = (Mount(job.workdir, job.workdir, read_only=False),) if job.copies_workdir else ()
    return (*workdir, *(mount for mount in job.mounts if mount.synced))


def kept_workdir(job: Job, options: Options) -> str:
    """Return where the volume of `runs` keeps the working directory, so that it outlives the pods; "" if nowhere.

    All nodes share it, as on Slurm: in most programs only rank 0 writes the snapshot from which all ranks resume. A
    program that writes it into the working directory would otherwise start over after each restart.
    """
    return f"{RUNS}/{job.name}/{WORKDIR}" if job.copies_workdir and options.runs.is_persistent else ""


def input_path(mount: Mount) -> str:
    """Return where the volume has a file or folder of this machine: at its path here, without the first '/'."""
    return mount.source.strip("/") or "."


def render(made: Sequence[Document], head: Sequence[str] = ()) -> str:
    """Return the objects as YAML, in block style as a person would write it, after the lines of a comment."""
    lines = "".join(f"# {_printable(line)}\n" for line in head)
    return lines + "".join(f"---\n{_yaml(document)}" for document in made)


def comment(job: Job, options: Options, *, attempt: int) -> list[str]:
    """Return what to do by hand besides `kubectl create -f`: the commands that `clusterctl launch` runs instead."""
    command = shlex.join(kubectl(options))
    lines = [f"{script.size(job)} on Kubernetes. Written by `clusterctl plan`."]
    if job.secrets:
        lines.append(f"The pods need a Secret with {', '.join(job.secrets)}; FILE has lines NAME=VALUE:")
        lines.append(f"  {command} create secret generic {job.name}-secrets --from-env-file=FILE")
    if inputs(job):
        kept = kept_workdir(job, options)
        copied = [mount for mount in inputs(job) if not (kept and mount.target == job.workdir)]
        pods = " ".join(pod_name(job, attempt, rank) for rank in range(job.nodes))
        lines.append("The pods wait for files of this machine. Once their init containers run:")
        if kept:
            first = f"{command} exec -i {pod_name(job, attempt, 0)} -c {FILES_CONTAINER} -- tar -x -C {kept}"
            lines.append(f"  tar -C {shlex.quote(job.workdir)} -c . | {first}")
        lines.append(f"  for pod in {pods}; do")
        if copied:
            paths = shlex.join(input_path(mount) for mount in copied)
            unpack = f"{command} exec -i $pod -c {FILES_CONTAINER} -- tar -x -C {INPUTS}"
            lines.append(f"    tar -C / -c -- {paths} | {unpack}")
        lines.append(f"    {command} exec $pod -c {FILES_CONTAINER} -- touch {COMPLETE}")
        lines.append("  done")
    return lines


def _object(kind: str, name: str, options: Options, found_by: Mapping[str, str]) -> Document:
    metadata: Document = {"name": name, "labels": {**options.labels, **found_by}}
    if options.annotations:
        metadata["annotations"] = dict(options.annotations)
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata}


def _pod(job: Job, options: Options, rank: int, *, attempt: int, port: int) -> Document:
    name = pod_name(job, attempt, rank)
    service = service_name(job, attempt)
    made = _object("Pod", name, options, {**labels(job, attempt), RANK_LABEL: str(rank)})
    if options.kueue_queue:
        made["metadata"]["labels"] |= {_QUEUE_LABEL: options.kueue_queue, _GROUP_LABEL: service}
        group = {_GROUP_COUNT: str(job.nodes), _GROUP_RETRIES: "false"}
        made["metadata"]["annotations"] = {**made["metadata"].get("annotations", {}), **group}
    volumes, mounts = _volumes(job, options, attempt)
    spreads_itself = "topologySpreadConstraints" in options.pod.spec
    spec: Document = {
        "restartPolicy": "Never",
        "hostname": name,
        "subdomain": service,
        "hostNetwork": options.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.host_network else None,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "runtimeClassName": options.runtime_class,
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secrets],
        "nodeSelector": dict(options.node_selector),
        "tolerations": _tolerations(job, options),
        "topologySpreadConstraints": [] if spreads_itself else _spread(job),
        "securityContext": _pod_security(options.security_context),
        "terminationGracePeriodSeconds": math.ceil(job.grace_s + contract.GRACE_MARGIN_S),
        "initContainers": [_files_container(job, options)] if inputs(job) else [],
        "containers": [_node_container(job, options, rank, mounts, attempt=attempt, port=port)],
        "volumes": volumes,
    }
    return {**made, "spec": _given(spec)}


def _node_container(
    job: Job, options: Options, rank: int, mounts: Sequence[Document], *, attempt: int, port: int
) -> Document:
    # With the machine's network, a declared port keeps two masters with the same port off one machine.
    ports = [{"containerPort": port}] if options.host_network and rank == 0 else []
    capabilities = ["IPC_LOCK"] if options.devices else []
    container: Document = {
        "name": NODE_CONTAINER,
        "image": job.image,
        "imagePullPolicy": options.image_pull_policy or _pull_policy(job.image),
        # not `command`: the entrypoint of the image stays, as with Docker
        "args": [_literal(word) for word in (job.python, _AGENT, *job.command)],
        "workingDir": job.workdir,
        "ports": ports,
        "env": _environment(job, options, rank, attempt=attempt, port=port),
        "resources": _resources(job, options, with_devices=True),
        "securityContext": _container_security(options.security_context, capabilities),
        "volumeMounts": list(mounts),
    }
    return _given(container)


def _files_container(job: Job, options: Options) -> Document:
    mounts = [{"name": INPUTS_VOLUME, "mountPath": INPUTS}]
    wait = _WAIT
    if kept := kept_workdir(job, options):
        # Kubernetes would make this folder for the subPath, as root, which not every volume allows.
        wait = f"mkdir -p {kept} && {{ {_WAIT_FOR_ALL.format(sent=f'{kept}/{SENT}')}; }}"
        mounts.append(_given({"name": RUNS_VOLUME, "mountPath": RUNS, "subPath": options.runs.sub_path}))
    unprivileged = options.security_context.model_copy(update={"privileged": None, "add_capabilities": ()})
    container: Document = {
        "name": FILES_CONTAINER,
        "image": job.image,
        "imagePullPolicy": options.image_pull_policy or _pull_policy(job.image),
        "command": ["sh", "-c", wait],
        "resources": _resources(job, options, with_devices=False),
        "securityContext": _container_security(unprivileged, []),
        "volumeMounts": mounts,
    }
    return _given(container)


def _pull_policy(image: str) -> str:
    """Return when to pull an image unless the section says it, by Kubernetes' own rule for an omitted policy."""
    name, _, digest = image.partition("@")
    _, _, tag = name.rpartition("/")[2].partition(":")
    return "IfNotPresent" if digest or tag not in ("", "latest") else "Always"


def _environment(job: Job, options: Options, rank: int, *, attempt: int, port: int) -> list[Document]:
    """Return the variables of a node. `job.env` does not override the contract's."""
    gpus = range(job.most_procs if job.device == "cuda" else 0)  # a container numbers its GPUs from 0
    rendezvous = (master(job, attempt), port)
    values = {
        **job.env,
        contract.NODE: f"node-{rank}",
        "PET_NODE_RANK": str(rank),
        **script.shared_environment(job, "kubernetes", attempt, f"{RUNS}/{job.name}", rendezvous),
        contract.NODES_ON_HOST: "1",
        contract.RENDEZVOUS_TIMEOUT: f"{job.rendezvous_timeout_s:g}",
        contract.HOLD: str(_HOLD_S[not options.runs.is_persistent]),
        **script.gpu_environment(job, gpus),
    }
    variables: list[Document] = [{"name": name, "value": _literal(value)} for name, value in values.items()]
    for name in job.secrets:
        key = {"name": f"{job.name}-secrets", "key": name}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return variables


def _resources(job: Job, options: Options, *, with_devices: bool) -> Document:
    limits = dict(options.limits)
    if with_devices:
        limits |= {name: str(count) for name, count in options.devices.items()}
        if job.device == "cuda":
            limits[options.gpu_resource] = str(job.most_procs)
    return _given({"requests": dict(options.requests), "limits": limits})


def _tolerations(job: Job, options: Options) -> list[Document]:
    """Return the section's tolerations, and those of the taint that keeps other pods off machines with GPUs."""
    tolerations: list[Document] = []
    if job.device == "cuda":
        domain = options.gpu_resource.partition("/")[0]
        taints = dict.fromkeys([f"{domain}/gpu", options.gpu_resource])
        tolerations = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
    for given in options.tolerations:
        fields: Document = {
            "key": given.key,
            "operator": given.operator or ("Equal" if given.value else "Exists"),
            "value": given.value,
            "effect": given.effect,
            "tolerationSeconds": given.seconds,
        }
        tolerations.append(_given(fields))
    return tolerations


def _spread(job: Job) -> list[Document]:
    """Return the constraint that spreads the pods over machines; without enough machines, they share some."""
    if job.nodes == 1:
        return []
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
    }
    return [{**constraint, "labelSelector": {"matchLabels": {LAUNCH_LABEL: job.launch_id}}}]


def _volumes(job: Job, options: Options, attempt: int) -> tuple[list[Document], list[Document]]:
    """Return the volumes of a pod, and where its node's container mounts them.

    A claim that is mounted twice is one volume: with two, old versions of Kubernetes wait for ever.
    """
    volumes: list[Document] = []
    # The init container needs the volume of the files even if the node's container mounts none of them.
    if kept_workdir(job, options):
        volumes.append({"name": INPUTS_VOLUME, "emptyDir": {}})
    mounts: list[Document] = []
    for name, source, mount in _mounted(job, options, attempt):
        volume = {"name": name or f"volume-{len(volumes) - 2}", **source}
        same = next((other for other in volumes if _is_same_volume(other, volume)), None)
        if same is None:
            volumes.append(volume)
        mounts.append(_given({"name": (same or volume)["name"], **mount}))
    _refuse_twice([mount["mountPath"] for mount in mounts])
    return volumes, mounts


def _mounted(job: Job, options: Options, attempt: int) -> list[tuple[str, Document, Document]]:
    """Return the name ("" for a number), the source and the mount of each volume of a node's container."""
    runs = options.runs
    runs_source = _source(runs.claim, runs.host_path)
    agent_source = {"configMap": {"name": agent_name(job, attempt)}}
    memory = _given({"medium": "Memory", "sizeLimit": options.shared_memory})
    mounted: list[tuple[str, Document, Document]] = [
        ("agent", agent_source, {"mountPath": _AGENT_FOLDER, "readOnly": True}),
        ("shm", {"emptyDir": memory}, {"mountPath": "/dev/shm"}),
        (RUNS_VOLUME, runs_source, {"mountPath": RUNS, "subPath": runs.sub_path}),
    ]
    for volume in options.volumes:
        mount = {"mountPath": volume.path, "subPath": volume.sub_path, "readOnly": volume.read_only or None}
        mounted.append(("", _source(volume.claim, volume.host_path, volume.empty_dir), mount))
    for folder in job.mounts:
        if not folder.synced:
            mount = {"mountPath": folder.target, "readOnly": folder.read_only or None}
            mounted.append(("", _source(None, folder.source), mount))
    kept = kept_workdir(job, options)
    for sent in inputs(job):
        if kept and sent.target == job.workdir:
            below = "/".join(filter(None, [runs.sub_path, kept.removeprefix(f"{RUNS}/")]))
            mounted.append((RUNS_VOLUME, runs_source, {"mountPath": sent.target, "subPath": below}))
            continue
        mount = {"mountPath": sent.target, "subPath": input_path(sent), "readOnly": sent.read_only or None}
        mounted.append((INPUTS_VOLUME, {"emptyDir": {}}, mount))
    return mounted


def _is_same_volume(one: Document, other: Document) -> bool:
    """Return whether volumes are one, also if their names differ, unless they are two empty folders."""
    return one == other or ("emptyDir" not in other and one == {**other, "name": one["name"]})


def _source(claim: str | None, host_path: str | None, size: str | None = None) -> Document:
    if claim:
        return {"persistentVolumeClaim": {"claimName": claim}}
    if host_path:  # the type, because a missing folder is an error and not a new one
        return {"hostPath": {"path": host_path, "type": "Directory"}}
    return {"emptyDir": {"sizeLimit": size} if size else {}}


def _refuse_twice(paths: Sequence[str]) -> None:
    for path in paths:
        if paths.count(path) > 1:
            hint = "choose another path: --mount SOURCE:PATH, or volumes under kubernetes in cluster.yaml"
            raise UsageError(f"{path} would be mounted twice in the containers", hint)


def _pod_security(security: SecurityContext) -> Document:
    profile = {"type": security.seccomp_profile} if security.seccomp_profile else {}
    fields = {
        "runAsUser": security.run_as_user,
        "runAsGroup": security.run_as_group,
        "runAsNonRoot": security.run_as_non_root,
        "fsGroup": security.fs_group,
        "supplementalGroups": list(security.supplemental_groups),
        "seccompProfile": profile,
    }
    return _given(fields)


def _container_security(security: SecurityContext, needed: Sequence[str]) -> Document:
    added = list(dict.fromkeys([*needed, *security.add_capabilities]))
    fields = {
        "privileged": security.privileged,
        "allowPrivilegeEscalation": security.allow_privilege_escalation,
        "capabilities": _given({"add": added, "drop": list(security.drop_capabilities)}),
    }
    return _given(fields)


def _given(fields: Document) -> Document:
    """Return the fields without those that are empty or None."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _literal(text: str) -> str:
    """Return a text that Kubernetes passes on as it is: it replaces $(NAME) by a variable, and $$ by $."""
    return text.replace("$", "$$")


def _printable(line: str) -> str:
    """Return a line without characters that would end a comment in YAML."""
    return "".join(character if character.isprintable() else "?" for character in line)


def _yaml(document: Document) -> str:
    import yaml  # importing it takes longer than importing all backends, and only a manifest needs it

    class Dumper(yaml.SafeDumper):
        """Quotes what Go's YAML, which kubectl uses, may read as another type (1e-3, y), and shows lines as lines."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style: str | None = "|" if "\n" in value else "'"
        if len(value) > 1 and re.fullmatch(r"[A-Za-z/][^\n]*", value):
            style = None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump(document, Dumper=Dumper, sort_keys=False, width=2**20, allow_unicode=True))
