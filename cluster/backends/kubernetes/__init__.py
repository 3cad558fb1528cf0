"""Backend kubernetes: one pod per node, and a headless Service by which the pods find the first one.

kubectl is the client, with the user's kubeconfig. A job's objects have labels, by which all of them are found without
a record. Nothing is installed in the cluster, and no rights on its machines are needed.
"""

import getpass
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rich.filesize import decimal

from cluster.agent import scripts
from cluster.backends import results, script
from cluster.backends.awake_clock import AwakeClock
from cluster.backends.base import Backend, FoundJob
from cluster.backends.kubernetes import (
    discover,
    files,
    kubectl,
    manifests,
    pods,
    preflight,
    template,
    waiting,
)
from cluster.backends.kubernetes.kubectl import (
    ForbiddenError,
    Kubectl,
    NodeSilentError,
    NotFoundError,
    QuotaError,
)
from cluster.backends.kubernetes.manifests import (
    ATTEMPT_LABEL,
    JOB_LABEL,
    LAUNCH_LABEL,
    MANAGED_BY,
    RANK_LABEL,
    USER_LABEL,
)
from cluster.backends.kubernetes.retries import Retries, is_half_started
from cluster.backends.node_monitor import NodeMonitor, in_words
from cluster.errors import ClusterError, LaunchError, NameTakenError, UnreachableError, UsageError
from cluster.spec.model import WORKDIR, Device, Inventory, Job, JobRecord, Machine, Node, Plan
from cluster.spec.node_status import NodeStatus, NodeStatuses
from cluster.spec.traits import NO_NODE_SHELL
from cluster.transport import Completed, parallel, waits
from cluster.transport.files import Report
from cluster.transport.process import interruptible

#: Why there is no `image push`, and what to do instead.
_NO_PUSH = (
    "the machines of a cluster get images from a registry (docker push REGISTRY/NAME, then --image REGISTRY/NAME), "
    "and those of one on this machine by: kind load docker-image NAME, minikube image load NAME, or "
    "docker save NAME | sudo k3s ctr images import -"
)
#: The label of the launcher, and those of a job and of its attempt.
OURS = f"{MANAGED_BY}=clusterctl"
#: The files on this machine with what the pods get: the working directory as it was at the launch, and what is where.
_INPUTS_TAR = "inputs.tar"
_INPUTS = "inputs.json"
#: The name in that archive of a working directory that a volume keeps. It is no path, so nothing else is below it.
_KEPT = ".workdir"
#: The file in an attempt's folder on this machine that says that its results are here.
_COLLECTED = "collected"
#: Time for Kubernetes to remove a pod after its grace period.
_REMOVAL_S = 60.0
_SEND_TRIES = 3
#: An agent whose ranks have ended ends at once. Others get this time, in seconds, before Kubernetes kills them.
_DELETE_GRACE_S = 5
#: Time for an agent to end its ranks after their grace.
_STOP_MARGIN_S = 5.0
_DELETE_POLL_S = 0.3
#: Time for Kubernetes to see that a container has ended.
_END_S = 4.0
#: The kinds of an attempt's objects.
_ATTEMPT_KINDS = "pods,services,configmaps"
#: The kinds of all objects of jobs.
_ALL_KINDS = ("pods", "services", "configmaps", "secrets")


@dataclass
class _Attempt:
    """What this process knows of an attempt."""

    monitors: list[pods.PodMonitor]
    states: list[waiting.PodState] = field(default_factory=list)
    polled_at: float = -math.inf
    statuses: NodeStatuses = field(default_factory=dict)
    retries: Retries = field(default_factory=Retries)
    transfers: dict[str, "_Transfer"] = field(default_factory=dict)
    #: Whether a container of it has run, so that there are files to collect; None: not known in this process.
    has_run: bool | None = None
    #: What could not be collected before the pods were deleted; None: nothing was collected yet.
    collected: list[str] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Launch(NamedTuple):
    """The labels of an object by which `gc` knows its launch."""

    job: str
    id: str
    user: str


@dataclass
class _Transfer:
    """The files on their way to one pod."""

    total: int
    sent: int = 0
    tries: int = 0
    error: ClusterError | None = None
    is_done: bool = False
    thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether its thread runs."""
        return self.thread is not None and self.thread.is_alive()

    def start(
        self, client: Kubectl, pod: str, python: str, parts: Sequence[files.Part], kept: Sequence[str]
    ) -> None:
        """Send in a thread, because the other nodes of a job must be watched in that time."""

        def count(sent: int) -> None:
            self.sent = sent

        def send() -> None:
            try:
                files.send(client, pod, python, parts, count, kept)
                self.is_done = True
            except ClusterError as error:
                self.error = error

        self.tries += 1
        self.thread = threading.Thread(target=send, daemon=True)
        self.thread.start()


class KubernetesBackend(Backend):
    """One pod per node, in the namespace of a kubeconfig's context."""

    name = "kubernetes"
    machines = "assigned"
    in_containers = True
    supports = frozenset({"--image", "--mount", "--set"})
    refusals: ClassVar[Mapping[str, str]] = {
        "--spares": "Kubernetes gives a restarted job another machine for a lost one",
        "--nodes MIN:MAX": "Kubernetes gives a job all of its nodes, or it waits",
        "unequal nodes": "Kubernetes chooses the machines, so all nodes get the same number",
        "--time": "no checkpoint is written at a pod's deadline; to set one: --set pod.spec.activeDeadlineSeconds=N",
        "--wait": "the pods of a job wait in the cluster until GPUs are free",
        "--array": "Kubernetes has no job arrays: launch a job for each line",
        "--build": _NO_PUSH,
        "--push": _NO_PUSH,
        "image push": _NO_PUSH,
        "--prologue": NO_NODE_SHELL,
        "sync": "a job sends its files to its pods; large data belongs on a volume, and kubectl cp copies it there",
    }
    section = "cluster.backends.kubernetes.options:Options"
    is_discoverable = True

    def __init__(self) -> None:
        self._monitor = NodeMonitor(
            lambda plan, _: self._poll(plan), lambda plans, _: self._poll_all(plans), silent_is_lost=False
        )
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        self._skipped: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def login_node(self, image: str) -> Machine:
        """Return what all nodes of a job have in common: they have no login, and these folders in their pods."""
        return Machine("kubernetes", "", run_dir=manifests.RUNS, data_dir=manifests.INPUTS)

    def words_of(self, key: str) -> list[str]:
        """Return the path in the section that a key of --set names. Below `pod`, it may have any length."""
        return manifests.words_of(key)

    def settings(self, listed: Mapping[str, Any], given: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the section with the settings of the command line. Raise UsageError for an invalid one."""
        return manifests.settings(listed, given)

    def folders(self, settings: Mapping[str, Any]) -> Sequence[str]:
        """Return the folders of the pods' volumes."""
        return (manifests.RUNS, *(volume["path"] for volume in settings.get("volumes", ())))

    def discover(self) -> tuple[Mapping[str, Any], Device, list[str]]:
        """Return the section for the current context of the kubeconfig, the device, and what was found, as sentences.

        Raises UsageError without a kubeconfig, UnreachableError if the API server does not answer.
        """
        settings, notes = discover.settings()
        return settings, "cuda" if "gpu_resource" in settings else "cpu", notes

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step: the manifest, and the command that creates its objects."""
        return manifests.plan(job, attempt=attempt, port=port, merge=template.merged)

    def check(self, job: Job, plan: Plan) -> None:
        """Check rights, names, GPUs and quota, and let the server check the manifest. Create nothing.

        Raises UsageError, NameTakenError or GpusHeldError; UnreachableError if the API server does not answer.
        """
        if problem := self.problem():
            raise UsageError(*problem)
        config_maps = _of_kind("ConfigMap", plan)
        needs = preflight.Needs(
            plan.job_id,
            plan.attempt == 1,
            _of_kind("Pod", plan),
            _text(plan),
            secrets=bool(plan.job.secrets),
            gpu_resource=manifests.options_of(job).gpu_resource,
            own=frozenset(document["metadata"]["name"] for document in config_maps),
        )
        self._skipped[plan.job_id] = preflight.check(_client(plan), needs)

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Create the objects of the attempt. If one is refused, delete the others and raise.

        Raises GpusHeldError for an exhausted quota, else LaunchError. A later attempt waits for its quota instead: its
        job has been running.
        """
        client = _client(plan)
        attempt = _attempt(plan)
        with self._lock:
            self._attempts[plan.job_id, plan.attempt] = attempt
        secret: list[str] = []
        try:
            if plan.job.secrets:  # apart from the others, because a later try cannot create it again
                if plan.attempt > 1:  # an attempt that could not be cleaned up may have left it
                    client.delete("secrets", _selector(plan, all_attempts=True))
                values = manifests.secret(plan.job, manifests.options_of(plan.job), secrets)
                secret = client.create(_as_text([values]))
            client.create(_as_text(_documents(plan)))
        except ClusterError as error:
            if isinstance(error, QuotaError) and plan.attempt > 1:
                attempt.retries.give_up(error.message, kinds=("ConfigMap", "Service", "Pod"))
                return
            with suppress(ClusterError):
                if secret:
                    client.delete(*secret)
                if isinstance(error, UnreachableError):  # what exists is unknown
                    client.delete(_kinds(plan), _selector(plan, all_attempts=True))
            if isinstance(error, QuotaError | NameTakenError | UnreachableError):
                raise
            raise LaunchError(f"kubernetes: {error.message}", error.hint) from error

    def send_files(
        self, job: Job, plan: Plan, sizes: Mapping[str, int] | None, earlier: Sequence[str], report: Report
    ) -> list[str]:
        """Keep the working directory as it is at the launch. Once a pod has a machine, `tend` sends it, and the mounts.

        `sizes` are the files of the working directory. Returns sentences for the user. Raises ClusterError.
        """
        targets = _input_targets(plan)
        mounts = [mount for mount in job.mounts if mount.target in targets]
        parts = [files.Part(mount.source, targets[mount.target]) for mount in mounts]
        folder = Path(plan.run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if sizes is not None and plan.workdir in targets:
                archive = folder / _INPUTS_TAR
                if plan.attempt > 1 and archive.exists():  # a restart gets the files of the launch
                    parts.append(files.Part(str(archive), is_archive=True))
                else:
                    parts.append(files.keep(plan.workdir, sizes, targets[plan.workdir], archive))
            if parts:
                (folder / _INPUTS).write_text(json.dumps([asdict(part) for part in parts]) + "\n")
        except OSError as error:
            why = f"this machine: {error.filename} cannot be written: {error.strerror}"
            raise ClusterError(why) from error
        return []

    def tend(self, record: JobRecord) -> list[str]:
        """Send files to the pods that wait for them, and give up an attempt of which only a part finds a machine.

        The job's supervisor calls this before each poll. Returns sentences for the user.
        """
        plan = record.plan
        options = manifests.options_of(record.job)
        attempt = self._known(plan)
        client = _client(plan)
        self._send_inputs(plan, attempt, client)
        overdue = {}
        # strict=False: an attempt has no states before its first poll
        for monitor, state in zip(attempt.monitors, attempt.states, strict=False):
            if monitor.misses_deletion(state):
                overdue[monitor.pod] = state
        _ask_again(client, overdue)
        retries = attempt.retries
        if retries.is_waiting:
            return self._try_again(plan, attempt, client)
        half_s = retries.note(is_half_started(attempt.states))
        if options.kueue_queue or half_s <= options.half_started_s:
            return []
        count = len(attempt.states)
        with_machine = sum(bool(state.host) for state in attempt.states)
        waits = next(state.status.detail for state in attempt.states if state.wants_room)
        with attempt.lock:  # no poll may see that the pods are gone
            _delete(client, "pods", _selector(plan))
            why = f"{with_machine} of {count} pods had a machine for {half_s:.0f} s"
            wait_s = retries.give_up(why)
        return [
            f"only {with_machine} of {count} pods found a machine ({waits}): gave it back to other jobs; "
            f"try {retries.tries + 1} in {wait_s:.0f} s"
        ]

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """Return statuses from the pods and their agents' files. Append to copies of the logs."""
        return self._monitor.statuses(plan)

    def observe_all(self, plans: Sequence[Plan]) -> list[Sequence[NodeStatus] | ClusterError]:
        """List the pods of each namespace once. Each running pod still takes one command for its agent."""
        indices: dict[tuple[str, str], list[int]] = {}
        for index, plan in enumerate(plans):
            indices.setdefault(_space(plan), []).append(index)
        spaces = {str(number): space for number, space in enumerate(indices)}

        def statuses_of(number: str) -> Sequence[Sequence[NodeStatus] | ClusterError]:
            space = spaces[number]
            return self._monitor.statuses_of([plans[index] for index in indices[space]], *space)

        answers: dict[int, Sequence[NodeStatus] | ClusterError] = {}
        for number, of_space in parallel.each([*spaces], statuses_of).items():
            of_plans = indices[spaces[number]]
            if isinstance(of_space, ClusterError):
                of_space = [of_space] * len(of_plans)
            answers |= dict(zip(of_plans, of_space, strict=True))
        return [answers[index] for index in range(len(plans))]

    def cancel(self, plan: Plan, *, grace_s: float, only_attempt: bool = False) -> None:
        """Stop the ranks, collect the results, and delete the job's objects, or only those of the attempt.

        Raises ClusterError if objects remain. Pods on machines that do not answer are deleted by force: their
        containers end when the machine returns, or by themselves, because a newer attempt runs.
        """
        with waits.waiting(f"Kubernetes to end the pods of {plan.job_id}", grace_s + _REMOVAL_S):
            self._cancel(plan, grace_s, only_attempt=only_attempt)

    def _cancel(self, plan: Plan, grace_s: float, *, only_attempt: bool) -> None:
        client = _client(plan)
        attempt = self._known(plan)
        attempt.retries.due_at = None
        listed = client.get("pods", _selector(plan, all_attempts=not only_attempt))
        running = [pod for pod in listed if waiting.observed("", pod).runs]
        silent, is_stopped = self._stop_ranks(plan, client, running, grace_s)
        are_pending = [pod["status"].get("phase") == "Pending" for pod in listed]
        if listed and all(are_pending) and attempt.has_run is None:
            attempt.has_run = False
        own = [pod for pod in running if pod["metadata"]["labels"].get(ATTEMPT_LABEL) == str(plan.attempt)]
        if own and not only_attempt and plan.nodes:
            attempt.collected = self._collect(plan, client, skip=silent)
        self._release(plan, client, [pod for pod in running if pod["metadata"]["name"] not in silent])
        if silent:
            client.delete("pods", *silent, force=True)
        kinds = _ATTEMPT_KINDS if only_attempt else _kinds(plan)
        delete_s = _DELETE_GRACE_S if is_stopped else max(_DELETE_GRACE_S, math.ceil(grace_s))
        _delete(client, kinds, _selector(plan, all_attempts=not only_attempt), delete_s)

    def exec(self, record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return `kubectl exec`. Raises UsageError if the node's container does not run."""
        plan = record.plan
        client = _client(record.plan)
        name = manifests.pod_of(plan, node)
        try:
            (pod,) = client.get("pods", name)
        except NotFoundError as error:
            raise UsageError(f"{node.name}: its pod {name} does not exist") from error
        state = waiting.observed(node.name, pod)
        if not state.runs:
            why = state.status.detail or state.status.phase
            raise UsageError(f"{node.name}: its container does not run: {why}")
        return client.exec_argv(name, script.in_setup(record.job, argv), tty=tty)

    def collect(self, plan: Plan) -> list[str]:
        """Copy the results to the plan's run directory; return a sentence for each failure.

        The files of pods can be read only while their containers exist, so `cancel` has done it before it deleted them.
        """
        attempt = self._known(plan)
        if attempt.collected is not None or attempt.has_run is False:
            return attempt.collected or []
        try:
            return self._collect(plan, _client(plan), skip=())
        except ClusterError as error:
            return [f"not copied: {error.message}"]

    def notes(self, job: Job) -> list[str]:
        """Return sentences about lost files, and about checks that were skipped."""
        is_kept = manifests.options_of(job).runs.is_persistent
        lost = () if is_kept else ("runs: names no volume, so a pod that is lost loses its files",)
        return [*lost, *self._skipped.get(job.name, ())]

    def jobs_on(
        self, inventory: Inventory, supervised: Collection[str]
    ) -> dict[str, list[FoundJob] | ClusterError]:
        """Return the jobs that have objects in the namespace. A job runs while a pod of it waits or runs."""
        client = _client_of(inventory.settings)
        try:
            of_launch: dict[_Launch, list[str]] = {}
            for kind in _ALL_KINDS:
                for launch in _launches_with(client, kind):
                    of_launch.setdefault(launch, []).append(kind)
            listed = client.get("pods", f"--selector={OURS}") if of_launch else []
        except ClusterError as error:
            return {self.name: error}
        alive = [pod for pod in listed if pod["status"].get("phase") in ("Pending", "Running")]
        running = {pod["metadata"]["labels"].get(LAUNCH_LABEL, "") for pod in alive}
        jobs = []
        for launch, kinds in sorted(of_launch.items()):
            is_own = launch.user == _user()
            runs = launch.id in running or launch.id in supervised
            what = (self.name, self.name, launch.job, launch.id, launch.user)
            jobs.append(FoundJob(*what, is_own=is_own, runs=runs, counts=Counter(kinds)))
        return {self.name: jobs}

    def remove(self, inventory: Inventory, found: FoundJob) -> None:
        """Delete everything of a launch, and wait for its end. Raises ClusterError."""
        client = _client_of(inventory.settings)
        kinds = [kind for kind in _ALL_KINDS if _may_delete(client, kind)]
        with waits.waiting(f"Kubernetes to delete {found.job}", _DELETE_GRACE_S + _REMOVAL_S):
            _delete(client, ",".join(kinds) or "pods", _launch_selector(found.launch_id))

    def problem(self) -> tuple[str, str] | None:
        """Return why this machine has no kubectl, as (message, hint), or None."""
        return kubectl.problem()

    def _known(self, plan: Plan) -> _Attempt:
        """Return what this process knows of the plan's attempt."""
        with self._lock:
            return self._attempts.setdefault((plan.job_id, plan.attempt), _attempt(plan))

    def _poll_all(self, plans: Sequence[Plan]) -> list[NodeStatuses | ClusterError]:
        """Poll the pods of jobs in one namespace with one list of them."""
        listed = pods.Listed(_client(plans[0]), f"--selector={OURS}")

        def poll(number: str) -> NodeStatuses:
            try:
                return self._poll(plans[int(number)], listed)
            except Exception as error:  # one job hides no other
                raise in_words(error) from error

        listed.pods(plans[0])  # an API server that does not answer is silent for all jobs
        return [*parallel.each([str(number) for number in range(len(plans))], poll).values()]

    def _poll(self, plan: Plan, listed: "pods.Listed | None" = None) -> NodeStatuses:
        """Poll the pods, at most once per interval, and their agents. `listed` has the pods of all jobs."""
        attempt = self._known(plan)
        with attempt.lock:
            if attempt.retries.is_waiting:
                waits = NodeStatus("", "pending", detail=attempt.retries.detail, starts_over=True)
                return {node.name: replace(waits, node=node.name) for node in plan.nodes}
            if time.monotonic() - attempt.polled_at < pods.INTERVAL_S:
                return attempt.statuses
            listed = listed or pods.Listed(_client(plan), _selector(plan))
            statuses, attempt.states = pods.poll(_client(plan), plan, attempt.monitors, listed)
            attempt.statuses = {status.node: self._with_transfer(attempt, status) for status in statuses}
            attempt.polled_at = time.monotonic()
            are_idle = [state.status.phase == "pending" or state.is_final for state in attempt.states]
            if any(state.runs for state in attempt.states):
                attempt.has_run = True
            elif attempt.has_run is None and all(are_idle):
                attempt.has_run = False
            return attempt.statuses

    def _with_transfer(self, attempt: _Attempt, status: NodeStatus) -> NodeStatus:
        """Add how far the files are on their way to the node; a node that cannot get them has ended."""
        transfer = attempt.transfers.get(status.node)
        if transfer is None or transfer.is_done or status.phase != "pending":
            return status
        if transfer.error is not None and transfer.tries >= _SEND_TRIES:
            return replace(status, phase="exited", exit_code=1, detail=f"its files: {transfer.error.message}")
        progress = f"{decimal(transfer.sent)} of {decimal(transfer.total)}"
        return replace(status, detail=f"receives its files: {progress}")

    def _send_inputs(self, plan: Plan, attempt: _Attempt, client: Kubectl) -> None:
        """Start the transfers to the pods whose init container waits for files."""
        for monitor, state in zip(attempt.monitors, attempt.states, strict=False):
            if not state.receives:
                continue
            transfer = attempt.transfers.get(monitor.name)
            if transfer and (transfer.is_running or transfer.tries >= _SEND_TRIES):
                continue
            parts = _kept_parts(plan)
            transfer = transfer or _Transfer(sum(part.size for part in parts))
            attempt.transfers[monitor.name] = transfer
            kept = []
            if folder := manifests.kept_workdir(plan.job, manifests.options_of(plan.job)):
                launched_at = Path(plan.run_dir, _INPUTS_TAR).stat().st_mtime_ns
                kept = [_KEPT, folder, str(launched_at)]
                if monitor is attempt.monitors[0]:
                    kept.append("fill")
            transfer.start(client, monitor.pod, plan.job.python, parts, kept)

    def _try_again(self, plan: Plan, attempt: _Attempt, client: Kubectl) -> list[str]:
        """Create the pods of the attempt again, if it is time."""
        retries = attempt.retries
        if retries.due_at is None or retries.clock() < retries.due_at:
            return []
        try:
            wanted = [document for document in _documents(plan) if document["kind"] in retries.kinds]
            client.create(_as_text(wanted))
        except QuotaError as error:
            retries.give_up(error.message, kinds=retries.kinds)
            return []
        with attempt.lock:
            retries.due_at = None
            attempt.polled_at = -math.inf
            attempt.transfers = {}
            attempt.monitors = [pods.PodMonitor(plan, rank, is_again=True) for rank in range(len(plan.nodes))]
        return [f"try {retries.tries + 1}: created the pods again"]

    def _stop_ranks(
        self, plan: Plan, client: Kubectl, running: Sequence[Mapping[str, Any]], grace_s: float
    ) -> tuple[set[str], bool]:
        """Ask the agents to stop their ranks, and wait for that.

        Return the pods whose machines do not answer, and whether the ranks of all others have ended.
        """
        silent = {monitor.pod for monitor in self._known(plan).monitors if monitor.is_silent}
        asked = [pod for pod in running if pod["metadata"]["name"] not in silent]
        if not asked or grace_s == 0:
            return silent, True
        results = self._run_in(plan, client, asked, "stop", str(math.ceil(grace_s)))
        silent |= {name for name, error in results.items() if isinstance(error, NodeSilentError)}
        clock = AwakeClock()
        until = clock() + grace_s + _STOP_MARGIN_S
        monitors = self._known(plan).monitors
        left = [monitor for monitor in monitors if monitor.pod in results and monitor.pod not in silent]
        is_asked = all(isinstance(done, Completed) and not done.code for done in results.values())
        while left and is_asked and clock() < until:
            for monitor in left:
                monitor.start(client)
            for monitor in left:
                monitor.wait(time.monotonic() + 1)
            left = [monitor for monitor in left if not monitor.has_ended]
            time.sleep(_DELETE_POLL_S)
        return silent, not left

    def _release(self, plan: Plan, client: Kubectl, running: Sequence[Mapping[str, Any]]) -> None:
        """Let the agents end, since the pod of a container that has ended is deleted at once."""
        self._run_in(plan, client, running, "release")
        until = time.monotonic() + _END_S
        while running and time.monotonic() < until:
            time.sleep(_DELETE_POLL_S)
            listed = client.get("pods", _selector(plan, all_attempts=True))
            running = [pod for pod in listed if waiting.observed("", pod).runs]

    def _run_in(
        self, plan: Plan, client: Kubectl, running: Sequence[Mapping[str, Any]], script: str, *words: str
    ) -> dict[str, Completed | ClusterError]:
        """Run a program of `in_pod` for the node of each pod; return the results by the names of the pods."""
        labels = {pod["metadata"]["name"]: pod["metadata"]["labels"] for pod in running}
        text = scripts.text(f"backends/kubernetes/in_pod/{script}.py")

        def run(pod: str) -> Completed:
            attempt = labels[pod][ATTEMPT_LABEL]
            rank = labels[pod][RANK_LABEL]
            node = f"{plan.dir_on(plan.nodes[0].machine)}/attempt-{attempt}/node-{rank}"
            return client.exec(pod, [plan.job.python, "-c", text, node, *words])

        return parallel.each([*labels], run)

    def _collect(self, plan: Plan, client: Kubectl, skip: Collection[str]) -> list[str]:
        """Copy the results from the first pod that answers, of the others only the ranks' logs."""
        nodes = {manifests.pod_of(plan, node): node for node in plan.nodes}
        running = {}
        for pod in client.get("pods", _selector(plan)):
            name = pod["metadata"]["name"]
            if name in nodes:
                state = waiting.observed(nodes[name].name, pod)
                if state.runs:
                    running[name] = state
        readable = [name for name in nodes if name in running and name not in skip]
        collected = Path(plan.attempt_dir, _COLLECTED)
        if not readable and collected.exists():
            return []  # another process has collected them, such as the supervisor in the background
        if not readable:
            why = "their machines do not answer" if skip else "no container of the job runs any more"
            return [f"not copied: the files of the pods cannot be read, because {why}"]
        folder = plan.dir_on(plan.nodes[0].machine)
        python = plan.job.python

        def copy(pod: str) -> None:
            fetch = partial(files.fetch, client, pod, python)
            if pod != readable[0]:
                logs = f"attempt-{plan.attempt}/ranks/{nodes[pod].name}"
                fetch(f"{folder}/{logs}", f"{plan.run_dir}/{logs}", run_dir=plan.run_dir)
                return
            # An earlier job of this name may have left attempts in the volume that this job has yet to make.
            later = (f"/attempt-{number}" for number in range(plan.attempt + 1, plan.job.max_restarts + 2))
            fetch(folder, plan.run_dir, excluded=(*results.NOT_RESULTS, f"/{WORKDIR}", *later))
            if plan.workdir:
                since = running[pod].started_at
                target = f"{plan.run_dir}/{WORKDIR}"
                fetch(plan.workdir, target, since=since, compare=plan.workdir, run_dir=plan.run_dir)

        copied = interruptible(lambda: parallel.each(readable, copy))
        errors = [error for error in copied.values() if isinstance(error, ClusterError)]
        failures = [f"not copied: {error.message}" for error in errors]
        if not failures:
            with suppress(OSError):
                collected.touch()
        elif collected.exists():  # another process has done it meanwhile, and released the containers
            return []
        if readable[0] != next(iter(nodes)):
            failures.append(f"the results here come from {nodes[readable[0]].name}")
        return failures


def _delete(client: Kubectl, kinds: str, selector: str, grace_s: int = _DELETE_GRACE_S) -> None:
    """Delete objects, and wait until the pods are gone; by force those whose machine does not end them.

    A kubelet may miss a deletion: it is asked again. While it answers, a container that runs is never removed by force,
    because it could continue to write.
    """
    client.delete(kinds, selector, grace_s=grace_s)
    clock = AwakeClock()
    forced_at = clock() + grace_s
    until = forced_at + _REMOVAL_S
    ask_at = clock() + grace_s + pods.MISSED_S
    while left := client.get("pods", selector):
        states = {pod["metadata"]["name"]: waiting.observed("", pod) for pod in left}
        lost = [name for name, state in states.items() if state.host_is_silent]
        if clock() > forced_at:  # nothing runs in these, and a kubelet may take a minute to say so
            lost += [name for name, state in states.items() if not state.runs]
        if lost:
            client.delete("pods", *lost, force=True)
        elif clock() > until:
            hint = f"kubectl delete pods {' '.join(states)} --grace-period=0 --force"
            raise ClusterError(f"kubernetes: these pods do not end: {', '.join(states)}", hint)
        elif clock() > ask_at:
            ask_at += pods.MISSED_S
            _ask_again(client, states)
        time.sleep(_DELETE_POLL_S)


def _ask_again(client: Kubectl, deleted: Mapping[str, waiting.PodState]) -> None:
    """Delete pods again that have been deleted. Only a shorter grace period is news to a kubelet."""
    for name, state in deleted.items():
        client.delete("pods", name, grace_s=max(1, state.grace_s // 2))


def _attempt(plan: Plan) -> _Attempt:
    return _Attempt([pods.PodMonitor(plan, rank) for rank in range(len(plan.nodes))])


def _client(plan: Plan) -> Kubectl:
    """Return the client with context and namespace of the plan's job."""
    return Kubectl(*_space(plan))


def _space(plan: Plan) -> tuple[str, str]:
    """Return the context and the namespace of the plan's job."""
    assert plan.job.queue is not None
    settings = plan.job.queue.settings
    return settings.get("context", ""), settings.get("namespace", "")


def _client_of(settings: Mapping[str, Any]) -> Kubectl:
    return Kubectl(settings.get("context", ""), settings.get("namespace", ""))


def _selector(plan: Plan, *, all_attempts: bool = False) -> str:
    """Return the option that selects the objects of a launch, or only those of the plan's attempt."""
    launch = _launch_selector(plan.job.launch_id)
    return launch if all_attempts else f"{launch},{ATTEMPT_LABEL}={plan.attempt}"


def _may_delete(client: Kubectl, kind: str) -> bool:
    return client.run("auth", "can-i", "delete", kind).out.strip() == "yes"


def _launches_with(client: Kubectl, kind: str) -> list["_Launch"]:
    """Return the launch of each object of a kind; none of a kind that the user may not list, such as Secrets."""
    labels = (JOB_LABEL, LAUNCH_LABEL, USER_LABEL)
    fields = '{","}'.join(f"{{.metadata.labels.{label}}}" for label in labels)
    columns = f'--output=jsonpath={{range .items[*]}}{fields}{{"\\n"}}{{end}}'
    try:
        lines = client.text("get", kind, f"--selector={OURS},{LAUNCH_LABEL}", columns).splitlines()
    except ForbiddenError:
        return []
    return [_Launch(*line.split(",")) for line in lines]


def _launch_selector(launch_id: str) -> str:
    return f"--selector={OURS},{LAUNCH_LABEL}={launch_id}"


def _user() -> str:
    """Return who launches, as a label: the rights in a cluster may be shared by several people."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no entry for this user
        name = ""
    return manifests.user_label(name, os.getuid())


def _kinds(plan: Plan) -> str:
    """Return the kinds of a job's objects. A user without secrets needs no right to delete them."""
    return _ATTEMPT_KINDS + (",secrets" if plan.job.secrets else "")


def _text(plan: Plan) -> str:
    (text,) = plan.steps[0].files.values()
    return text


def _documents(plan: Plan) -> list[dict[str, Any]]:
    import yaml  # importing it takes longer than importing all backends

    return [document for document in yaml.safe_load_all(_text(plan)) if document]


def _of_kind(kind: str, plan: Plan) -> list[dict[str, Any]]:
    return [document for document in _documents(plan) if document["kind"] == kind]


def _as_text(documents: Sequence[dict[str, Any]]) -> str:
    """Return a manifest of objects with the label of this user; JSON is YAML, too."""
    labelled = [manifests.launched_by(document, _user()) for document in documents]
    return "".join(f"---\n{json.dumps(document)}\n" for document in labelled)


def _input_targets(plan: Plan) -> dict[str, str]:
    """Return where the pods expect files of this machine: the folder in the volume, by the path in the container."""
    targets = {mount.target: manifests.input_path(mount) for mount in manifests.inputs(plan.job)}
    is_kept = manifests.kept_workdir(plan.job, manifests.options_of(plan.job))
    return targets | ({plan.workdir: _KEPT} if is_kept else {})


def _kept_parts(plan: Plan) -> list[files.Part]:
    """Return what `send_files` has kept for the pods."""
    try:
        return [files.Part(**part) for part in json.loads(Path(plan.run_dir, _INPUTS).read_text())]
    except (OSError, ValueError, TypeError):
        return []
