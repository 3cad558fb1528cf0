"""The backend on a real cluster: jobs, what they wait for, and faults. Each test sees what a user would read."""

import getpass
import json
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex

import pytest

from cluster.backends import log_files, logs
from cluster.backends.base import FoundJob
from cluster.backends.kubernetes import KubernetesBackend, pods
from cluster.errors import ClusterError, GpusHeldError, NameTakenError, UsageError
from cluster.spec.image import DEFAULT_IMAGE
from cluster.spec.model import Inventory, Job, JobRecord, Machine, Plan, Queue
from cluster.spec.mount import Mount
from cluster.supervisor import job_state
from tests.conftest import wait_until

pytestmark = pytest.mark.kubernetes

#: Limit of a wait; a test ends as soon as its condition holds.
WAIT_S = 120
WRITES = """
import os, time
rank = os.environ["PET_NODE_RANK"]
open(os.environ["CLUSTER_RUN_DIR"] + "/result-" + rank, "w").write(rank)
print("rank", rank, "began", flush=True)
time.sleep(float(os.environ["NAP_S"]))
"""


@dataclass
class FollowedJob:
    """A job that was started, followed as its supervisor does."""

    backend: KubernetesBackend
    job: Job
    plan: Plan
    notes: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    verdict: str = "waiting"

    def __post_init__(self):
        self.view = job_state.start(self.plan, time.time())
        self.reader = log_files.Reader(self.plan)

    def step(self):
        self.notes += self.backend.tend(JobRecord(self.plan, time.time(), self.job))
        statuses = self.backend.observe(self.plan)
        lines = self.reader.lines()
        self.log += lines
        events = [event for _, line in lines if (event := logs.event(line))]
        self.view = job_state.fold(self.view, statuses, events, time.time())
        self.verdict = job_state.judge(self.view, time.time(), WAIT_S)

    def until(self, condition):
        end = time.monotonic() + WAIT_S
        while not condition(self):
            assert time.monotonic() < end, f"{self.verdict}: {self.said}\n{self.log[-20:]}"
            self.step()
            time.sleep(0.2)
        return self

    def until_ended(self):
        return self.until(lambda run: run.verdict in ("done", "failed"))

    def until_joined(self):
        return self.until(lambda run: run.verdict == "joined")

    @property
    def said(self):
        """What the live table says of each node."""
        return [f"{node.phase}: {node.note} {node.status.silent}" for node in self.view.nodes]

    def end(self, grace_s=0.5):
        self.backend.cancel(self.plan, grace_s=grace_s)
        return self.backend.collect(self.plan)


@pytest.fixture
def start(kubectl, tmp_path, monkeypatch):
    """Return a function that checks and starts a job; all of them are ended after the test."""
    runs = []
    monkeypatch.setenv("PATH", f"{kubectl.folder}:{os.environ['PATH']}")

    def call(
        name, *, user="ada", nap_s=0, options=None, attempt=1, code=None, secrets=None, check=True, **fields
    ):
        monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig(user)))
        settings = {
            "command": ("--no-python", "python3", "-c", WRITES),
            "nodes": 2,
            "procs_per_node": 1,
            "device": "cpu",
            "image": DEFAULT_IMAGE,
            "says_ready": False,
            "run_root": str(tmp_path),
            "env": {"NAP_S": str(nap_s)},
            "launch_id": token_hex(8),
            "secrets": tuple(secrets or ()),
            **fields,
        }
        queue = Queue(Machine("kubernetes", "", run_dir="/runs"), options or {})
        job = Job(name=name, queue=queue, **settings)
        backend = KubernetesBackend()
        plan = backend.plan(job, attempt=attempt, port=29500)
        Path(plan.attempt_dir).mkdir(parents=True)
        if check:
            backend.check(job, plan)
        backend.send_files(job, plan, code, (), lambda *_: None)
        runs.append(FollowedJob(backend, job, plan))
        backend.submit(plan, secrets or {})
        return runs[-1]

    yield call
    for run in runs:
        run.backend.cancel(run.plan, grace_s=0)


def node_of(kubectl, pod, namespace="ada"):
    return kubectl("get", "pod", pod, "--namespace", namespace, "--output", "jsonpath={.spec.nodeName}")


def test_two_nodes_train_and_the_results_come_back(start, tmp_path):
    command = ("-m", "trainer", "train", "--device", "cpu", "--epochs", "1")
    run = start("digits", command=command, says_ready=True, procs_per_node=1)
    assert run.until_ended().verdict == "done", run.said
    assert run.end() == []
    assert (tmp_path / "digits" / "best.pt").exists()
    assert {path.parent.name for path in (tmp_path / "digits" / "attempt-1" / "ranks").rglob("*.log")} == {
        "node-0",
        "node-1",
    }


def test_code_data_and_secrets_arrive_and_changed_files_come_back(start, tmp_path, kubectl):
    code = tmp_path / "code"
    data = tmp_path / "data"
    (code / "below").mkdir(parents=True)
    data.mkdir()
    (data / "value.txt").write_text("17")
    (code / "below" / "kept.txt").write_text("kept")
    text = f"import os; print('data', open('{data}/value.txt').read(), 'secret', len(os.environ['TOKEN']))"
    (code / "main.py").write_text(f"{text}\nopen('below/new.txt', 'w').write('new')")
    mounts = (Mount(str(data), str(data), synced=True),)
    fields = {"command": ("main.py",), "workdir": str(code), "copies_workdir": True, "mounts": mounts}
    run = start(
        "files", code={"main.py": 1, "below/kept.txt": 1}, secrets={"TOKEN": "s3cret-value"}, **fields
    )
    assert run.until_ended().verdict == "done", run.said
    assert ("node-0", "data 17 secret 12") in run.log
    manifest = kubectl("get", "pods,configmaps", "--namespace", "ada", "--output", "json")
    assert "s3cret-value" not in manifest + next(iter(run.plan.steps[0].files.values()))
    assert run.end() == []
    back = tmp_path / "files" / "workdir"
    assert {str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()} == {"below/new.txt"}


def test_a_pod_has_the_fields_of_the_section_and_runs_beside_a_sidecar(start, kubectl):
    """An ordinary sidecar, which never ends by itself: Kubernetes 1.20 has no native ones."""
    kubectl("create", "secret", "generic", "hub", "--namespace=ada", "--from-literal=token=s3cret-value")
    hosts = [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1", "n2"]}]
    wanted = {"nodeSelectorTerms": [{"matchExpressions": hosts}]}
    hub = {"name": "HUB", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    sidecar = {"name": "proxy", "image": DEFAULT_IMAGE, "command": ["sleep", "600"]}
    spec = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": wanted}},
        "containers": [sidecar, {"name": "node", "env": [hub]}],
    }
    command = ("--no-python", "python3", "-c", "import os; print('hub', len(os.environ['HUB']))")
    try:
        run = start("fields", command=command, options={"pod": {"spec": spec}}).until_ended()
        assert run.verdict == "done", run.said
        assert {("node-0", "hub 12"), ("node-1", "hub 12")} <= {*run.log}
        (pod, other) = (f"fields-a1-{rank}" for rank in range(2))
        assert {node_of(kubectl, each) for each in (pod, other)} == {"n1", "n2"}  # they are spread
        names = kubectl(
            "get", "pod", pod, "--namespace=ada", "--output", "jsonpath={.spec.containers[*].name}"
        )
        assert names.split() == ["node", "proxy"]
        assert run.end() == []
        gone = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "nope", "key": "a"}}}
        absent = {"pod": {"spec": {"containers": [{"name": "node", "env": [gone]}]}}}
        with pytest.raises(UsageError, match="the namespace has no Secret nope"):
            start("absent", options=absent)
        with pytest.raises(UsageError, match="does not know the field afinity"):
            start("typo", options={"pod": {"spec": {"afinity": {}}}})
    finally:
        kubectl("delete", "secret", "hub", "--namespace=ada")


def test_a_job_says_what_it_waits_for_and_starts_then(start, fault):
    for host in ("n0", "n1", "n2"):
        fault("busy", host)
    run = start("waits", device="cuda", user="admin")
    run.until(lambda run: all("Insufficient nvidia.com/gpu" in said for said in run.said))
    fault("free", "n1")
    assert run.until_ended().verdict == "done"


def test_a_job_that_never_ran_has_nothing_to_collect(start, fault):
    for host in ("n0", "n1", "n2"):
        fault("busy", host)
    run = start("idle", device="cuda", user="admin")
    run.until(lambda run: all("Insufficient nvidia.com/gpu" in said for said in run.said))
    assert KubernetesBackend().collect(run.plan) != []  # another process does not know
    assert run.end() == []


@pytest.mark.parametrize(
    ("image", "words"),
    [("trainer:NO:1", "is not the name of a container image"), ("trainer:absent", "cannot be pulled")],
)
def test_an_image_that_will_not_come_ends_the_attempt(start, image, words):
    run = start("image", image=image).until_ended()
    assert run.verdict == "failed"
    assert any(words in said for said in run.said)  # of the first pod, which ends the attempt
    assert 2 in [node.status.exit_code for node in run.view.nodes]  # the rule that does not restart


def test_a_killed_container_is_reported_with_its_signal(start, kubectl):
    run = start("killed", nap_s=600).until_joined()
    pod = f"{run.plan.job_id}-a1-1"
    script = (
        "import os; [os.kill(int(pid), 9) for pid in os.listdir('/proc') if pid.isdigit() and int(pid) > 1]"
    )
    kubectl.attempt("exec", pod, "--namespace", "ada", "--container", "node", "--", "python3", "-c", script)
    run.until_ended()
    assert run.verdict == "failed"
    assert run.view.nodes[1].phase == "exited"
    assert run.view.nodes[1].status.failure.exit_code == 137
    assert run.end() == []


def test_a_deleted_pod_is_named(start, kubectl):
    run = start("deleted", nap_s=600).until_joined()
    kubectl("delete", "pod", "deleted-a1-1", "--namespace", "ada", "--wait=false")
    run.until_ended()
    assert run.view.nodes[1].phase == "lost"
    assert run.view.nodes[1].note.startswith("its pod was deleted")


def test_a_silent_kubelet_is_named_at_once_and_its_pod_is_forced_away(start, kubectl, fault):
    run = start("silent", nap_s=600, nodes=1).until_joined()
    host = node_of(kubectl, "silent-a1-0")
    fault("kubelet-kill", host)
    run.until(lambda run: f"its machine {host} has not answered" in run.said[0])
    run.until_ended()
    assert run.said[0].startswith(f"lost: its machine {host} is lost")
    run.end()
    assert not kubectl("get", "pods", "--namespace", "ada", "--output", "name")


def test_the_job_runs_on_while_the_api_server_is_down(start, fault):
    run = start("api", nap_s=20).until_joined()
    fault("api-kill")
    run.until(lambda run: all("API server does not answer" in said for said in run.said))
    assert run.verdict == "joined"
    fault("api-start")
    assert run.until_ended().verdict == "done"


def test_an_exhausted_quota_is_refused_with_nothing_left(start, kubectl, fault):
    fault("quota", "ada", "1")
    with pytest.raises(GpusHeldError, match="quota testbed-fault"):
        start("quota", device="cuda")
    assert not kubectl(
        "get", "pods,services,configmaps", "--namespace", "ada", "--selector", "clusterctl/job", "-oname"
    )
    with pytest.raises(UsageError, match="but the job needs 2"):
        start("quota-admin", device="cuda", user="admin", options={"namespace": "ada"})


def test_a_restart_waits_for_its_quota(start, fault):
    fault("quota", "ada", "1")
    began = time.monotonic()
    run = start("again", device="cuda", attempt=2, check=False)
    assert time.monotonic() - began < 30  # the pod that was created before the quota was reached
    run.until(lambda run: all("quota" in said for said in run.said))
    fault("no-quota", "ada")
    assert run.until_ended().verdict == "done"


def test_missing_rights_are_listed(start):
    with pytest.raises(
        UsageError, match="missing permissions in the namespace bob: create, get, list, delete pods"
    ):
        start("rights", options={"namespace": "bob"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"namespace": "absent"}, "no namespace absent"),
        ({"context": "absent"}, "no context absent"),
        ({"runs": {"claim": "absent"}}, "no PersistentVolumeClaim absent"),
        ({"image_pull_secrets": ["absent"]}, "no Secret absent"),
        ({"priority_class": "absent"}, "no PriorityClass absent"),
        ({"gpu_resource": "amd.com/gpu"}, "no machine has one; the cluster has nvidia.com/gpu"),
    ],
)
def test_what_does_not_exist_is_found_before_the_start(start, options, words):
    with pytest.raises(ClusterError, match=words):
        start("absent", user="admin", device="cuda", options=options)


def test_a_name_in_use_is_refused_and_gc_removes_a_launch_by_its_id(start, tmp_path, monkeypatch):
    run = start("name", nap_s=600)
    with pytest.raises(NameTakenError, match="a job name already exists"):
        start("name", run_root=str(tmp_path / "other"))
    backend = run.backend
    queue = run.job.queue
    cluster = Inventory((queue.login,), backend.name, is_assigned=True, settings=queue.settings)
    (found,) = backend.jobs_on(cluster, ())[backend.name]
    assert (found.job, found.launch_id, found.is_own, found.runs) == ("name", run.job.launch_id, True, True)
    assert found.counts == {"pods": 2, "services": 1, "configmaps": 1}
    for another_user in (lambda: "bob", lambda: ""):  # the rights of a namespace may be shared
        with monkeypatch.context() as patched:
            patched.setattr(getpass, "getuser", another_user)
            (seen,) = backend.jobs_on(cluster, ())[backend.name]
            assert (seen.user, seen.is_own) == (found.user, False)
    backend.remove(cluster, replace(found, launch_id=token_hex(8)))
    assert backend.jobs_on(cluster, ()) == {backend.name: [found]}
    backend.remove(cluster, found)
    assert backend.jobs_on(cluster, ()) == {backend.name: []}


def test_attempts_of_an_earlier_job_with_this_name_do_not_come_back(start, tmp_path):
    options = {"runs": {"claim": "runs"}}
    earlier = start("twice", attempt=2, check=False, nodes=1, options=options)
    assert earlier.until_ended().verdict == "done"
    assert earlier.end() == []
    again = start("twice", nodes=1, options=options, run_root=str(tmp_path / "again"), max_restarts=3)
    assert again.until_ended().verdict == "done"
    assert again.end() == []
    assert {path.name for path in (tmp_path / "again" / "twice").glob("attempt-*")} == {"attempt-1"}


def test_a_half_started_job_gives_its_machine_back(start, fault):
    fault("busy", "n0")
    fault("busy", "n1")
    options = {"half_started_s": 3}
    run = start("half", device="cuda", procs_per_node=2, options=options, user="admin")
    run.until(lambda run: any("only 1 of 2 pods found a machine" in note for note in run.notes))
    run.until(lambda run: all(said.startswith("pending: 1 of 2 pods had a machine") for said in run.said))
    fault("free", "n0")
    assert run.until_ended().verdict == "done"


def test_stop_lets_the_ranks_write_and_collects(start, tmp_path):
    program = "import signal,time\ndef end(*_):\n open('/runs/stopped/saved','w').write('s'); raise SystemExit(75)\n"
    program += "signal.signal(signal.SIGTERM, end); time.sleep(600)"
    run = start("stopped", command=("--no-python", "python3", "-c", program)).until_joined()
    assert run.end(grace_s=20) == []
    assert (tmp_path / "stopped" / "saved").read_text() == "s"
    with pytest.raises(UsageError, match="does not exist"):
        run.backend.exec(JobRecord(run.plan, 0, run.job), run.plan.nodes[0], ["ls"], tty=False)


#: A pod on a machine that has no kubelet: as if a kubelet had missed its deletion.
GHOST = """
apiVersion: v1
kind: Node
metadata: {name: ghost}
---
apiVersion: v1
kind: Pod
metadata:
  name: missed-a1-0
  namespace: ada
  labels: {app.kubernetes.io/managed-by: clusterctl, clusterctl/job: missed, clusterctl/launch: abcdef0123456789}
spec:
  nodeName: ghost
  containers: [{name: node, image: pause:0.1}]
"""


@pytest.fixture
def missed(kubectl):
    """Return a function that gives the pod of a job this state of its container."""
    kubectl("create", "--filename=-", text=GHOST)

    def has(phase, state):
        pod = json.loads(kubectl("get", "pod", "missed-a1-0", "--namespace", "ada", "--output", "json"))
        container = {"name": "node", "image": "pause:0.1", "imageID": "", "ready": False, "restartCount": 0}
        pod["status"] = {"phase": phase, "containerStatuses": [{**container, "state": state}]}
        kubectl(
            "replace", "--raw", "/api/v1/namespaces/ada/pods/missed-a1-0/status", "-f-", text=json.dumps(pod)
        )

    yield has
    kubectl("delete", "node", "ghost")
    force = ("--grace-period=0", "--force", "--ignore-not-found")
    kubectl("delete", "pod", "missed-a1-0", "--namespace", "ada", *force)


def test_a_kubelet_that_has_missed_a_deletion_is_asked_again(missed, kubectl, monkeypatch):
    missed("Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
    monkeypatch.setattr(pods, "MISSED_S", 1.0)
    seen = []

    def grace():
        words = ("get", "pod", "missed-a1-0", "--namespace", "ada", "--ignore-not-found")
        found = kubectl(*words, "--output", "jsonpath={.metadata.deletionGracePeriodSeconds}")
        seen.extend([found] if found and found not in seen else [])
        return seen

    with removal(kubectl, monkeypatch) as remover:
        assert wait_until(lambda: grace() == ["5", "2", "1"], timeout_s=60)
        assert remover.is_alive()  # a container that runs is not removed by force
        missed("Failed", {"terminated": {"exitCode": 143, "finishedAt": "2026-01-01T00:00:00Z"}})
        remover.join(WAIT_S)
    assert not kubectl("get", "pods", "--namespace", "ada", "--output", "name")


@contextmanager
def removal(kubectl, monkeypatch):
    """A thread that removes the job `missed`, as `clusterctl gc` does."""
    monkeypatch.setenv("PATH", f"{kubectl.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig("ada")))
    backend = KubernetesBackend()
    cluster = Inventory((backend.login_node(""),), backend.name, is_assigned=True)
    missed = FoundJob(backend.name, backend.name, "missed", "abcdef0123456789", "ada", True, False, {})
    remover = threading.Thread(target=backend.remove, args=(cluster, missed))
    remover.start()
    yield remover
    assert not remover.is_alive()
