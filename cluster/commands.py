"""What the verbs for jobs do, without printing: plan, launch, follow, stop; a `Show` is told what to draw."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from cluster import config, fanout, files, logs, looks, rendezvous, report, rsync
from cluster.backends import BACKENDS, Backend
from cluster.backends.compose import ComposeBackend, engine_problem, is_rootless
from cluster.backends.hosts import HostsBackend
from cluster.config import Here, Request
from cluster.errors import (
    ClusterError,
    GpusHeldError,
    LaunchError,
    NameTakenError,
    PortTakenError,
    UnreachableError,
    UsageError,
    with_hint,
)
from cluster.model import Inventory, Job, Node, Plan, Record, Step
from cluster.records import Outcome, Records
from cluster.rendezvous import JobView, Verdict
from cluster.shells import reach
from cluster.shells.local import LocalShell

TICK_S = 0.4
#: How the sentence begins that names machines on which a job may still run.
NOT_CLEANED_UP = "not cleaned up"
#: How long a node may take to end after SIGTERM: after a failure nothing is worth the wait, after a stop something is.
FAILED_GRACE_S = 0.5
STOP_GRACE_S = 15.0
#: How long to wait for the node that failed first, when so far only others have noticed: a dead machine says nothing.
_CAUSE_S = 4.0
_PORT_TRIES = 20
#: How many of a node's last lines are kept: its ranks' tracebacks, one after the other.
_TAIL = 400


class Show(Protocol):
    """Draws a job; `lines` are (node, text) pairs, each given once."""

    def begin(self, plan: Plan) -> None:
        """An attempt begins to be followed."""
        ...

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Draw the newest view and the lines that have come since the last one."""
        ...

    def note(self, text: str) -> None:
        """One plain sentence for the user."""
        ...


class Quiet:
    """Draws nothing."""

    def begin(self, plan: Plan) -> None:
        """Nothing."""

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


@dataclass
class Watched:
    """A job as far as it was followed: why following ended, the last view, each node's last lines, who followed."""

    plan: Plan
    verdict: Verdict
    view: JobView
    tails: Mapping[str, Sequence[str]]
    port_was_lost: bool
    follower: Follower


@dataclass
class Follower:
    """Reads a job's logs and states step by step; every line once."""

    plan: Plan
    backend: Backend
    started: float
    view: JobView = field(init=False)
    _said: dict[str, deque[str]] = field(init=False)

    def __post_init__(self) -> None:
        """Start before the first line."""
        self.view = rendezvous.start(self.plan, self.started)
        self._reader = logs.Reader({node.name: 0 for node in self.plan.nodes})
        self._said = {node.name: deque(maxlen=_TAIL) for node in self.plan.nodes}

    @property
    def tails(self) -> dict[str, list[str]]:
        """The last lines of each node's log."""
        return {node: list(said) for node, said in self._said.items()}

    @property
    def port_was_lost(self) -> bool:
        """Whether the master could not listen, because another program had taken the port since the check."""
        failure = self.view.nodes[0].failure or {}
        words = [str(failure.get("error", "")), *self._said[self.plan.nodes[0].name]]
        signs = ("EADDRINUSE", "address already in use", f"MASTER_PORT {self.plan.master_port} is taken")
        return any(sign.lower() in line.lower() for line in words for sign in signs)

    def step(self, now: float, *, everything: bool = False) -> list[tuple[str, str]]:
        """Poll once; returns the program's new lines, with `everything` also the agent's."""
        # The states first: a node seen as exited has written its last line by then.
        statuses = self.backend.observe(self.plan)
        events, texts = [], []
        for node, line in self._reader.lines(self.backend.logs(self.plan, self._reader.offsets)):
            event = logs.event(line)
            if event is not None:
                events.append(event)
            else:
                self._said[node].append(line)
                if everything or not line.startswith(logs.AGENT_PREFIX):
                    texts.append((node, line))
        self.view = rendezvous.fold(self.view, statuses, events, now)
        return texts


def here(request: Request, backend: str) -> Here:
    """What this machine is, as far as a job of this backend depends on it."""
    cwd = str(Path.cwd())
    paths = [Path(path) for path in config.named_paths(request, cwd)]
    existing = [path for path in paths if path.exists()]
    return Here(
        cwd=cwd,
        user="0:0" if backend == "compose" and is_rootless(LocalShell()) else f"{os.getuid()}:{os.getgid()}",
        python=sys.executable,
        gpus=_gpus() if request.device != "cpu" else (),
        existing=frozenset(str(path) for path in existing),
        folders=frozenset(str(path) for path in existing if path.is_dir()),
    )


def choose_backend(wanted: str, inventory: Inventory | None = None) -> tuple[str, str]:
    """The backend to use, and a sentence on why when `auto` fell on process groups; raises UsageError for others.

    Where there is an inventory, `auto` means its machines.
    """
    if wanted == "slurm" and inventory is not None and inventory.backend != "slurm":
        raise UsageError(
            f"--backend slurm: {inventory.path or 'the inventory'} has machines to log in to, and no Slurm cluster",
            "its first line: backend: slurm, its one node the login node; or another file: --inventory FILE",
        )
    if wanted == "ssh" and inventory is not None and inventory.backend == "slurm":
        raise UsageError(f"--backend ssh: {inventory.path} is of a Slurm cluster", "leave --backend out, or: slurm")
    if wanted == "slurm" or (wanted == "auto" and inventory is not None and inventory.backend == "slurm"):
        return "slurm", ""
    if wanted == "ssh" and inventory is None:
        raise UsageError("--backend ssh: no machines are named", "clusterctl init gpu-a gpu-b, or --hosts gpu-a,gpu-b")
    if inventory is not None and wanted == "auto":
        return "ssh", ""
    if wanted in BACKENDS:
        return wanted, ""
    if wanted not in ("auto", "here"):
        raise UsageError(f"--backend {wanted!r}", f"one of: auto, {', '.join(BACKENDS)}, here")
    problem = engine_problem(LocalShell())
    if problem is None:
        return "compose", ""
    why = problem[0].removeprefix("this machine: ")
    return "local", f"no containers, the nodes are process groups here (--backend compose makes this an error): {why}"


def resolve(request: Request, nodes: str, backend: str, inventory: Inventory | None) -> tuple[Job, str, list[str]]:
    """The job that a request on `nodes` nodes means, the backend that runs it, and what the user should know.

    Raises UsageError for what makes no sense.
    """
    chosen, why = choose_backend(backend, inventory)
    fewest, most = config.node_range(nodes, len(inventory.nodes) - request.spares if inventory else 1)
    request = replace(request, nodes=most, min_nodes=fewest, inventory=inventory)
    job, notes = config.job(request, here(request, chosen), chosen)
    return job, chosen, [*([why] if why else []), *notes]


def plan(job: Job, backend: str) -> Plan:
    """What launching the job would do, without looking at the machine: pure."""
    return BACKENDS[backend].plan(job, attempt=1, port=job.port or config.auto_port(job.name))


def launch(
    job: Job, backend: str, records: Records, *, numbered: bool, secrets: Mapping[str, str] | None = None
) -> Record:
    """Check, record, start: the job runs on all nodes when this returns, or on none when it raises ClusterError.

    `secrets` has the values of the job's secrets, which are in no plan and no record.
    """
    check_files(job)
    _refuse_held(job, records)
    nth = 0
    while True:
        named, nth = _unused_name(job, records, nth + 1) if numbered else (job, 0)
        try:
            made = free_plan(named, backend, attempt=1)
            break
        except NameTakenError:  # on a machine that another launching machine has used
            if not numbered:
                raise
    job = named
    if not numbered and Path(made.run_dir).exists():
        raise UsageError(f"{made.run_dir} is there already", "choose another --name, or remove the folder")
    record = Record(made, created_at=time.time(), job=replace(job, hosts=made.nodes if job.hosts else ()))
    with records.watch(record.plan.job_id):  # who attaches meanwhile sees nothing run, and is not to restart it
        records.reserve(record)
        try:
            start(record, records, secrets)
        except ClusterError as error:
            records.end(record.plan.job_id, "failed", error.message, error.exit_code)
            raise
        except KeyboardInterrupt:  # some nodes may have started
            _stop(record, records, grace_s=0)
            raise
    return record


def array_plan(jobs: Sequence[Job], at_once: int) -> tuple[list[Plan], Step]:
    """The plans of the jobs of a Slurm job array, and the step that submits all of them: pure."""
    from cluster.backends.slurm import SlurmBackend

    plans = [plan(job, "slurm") for job in jobs]
    return plans, SlurmBackend(reach).array(jobs[0], plans, at_once)


def launch_array(
    jobs: Sequence[Job], records: Records, at_once: int, secrets: Mapping[str, str] | None = None
) -> list[Record]:
    """Check, record and submit jobs as one Slurm job array: all of them, or none when it raises ClusterError."""
    from cluster.backends.slurm import SlurmBackend

    backend = SlurmBackend(reach)
    check_files(jobs[0])
    plans, step = array_plan(jobs, at_once)
    for job, made in zip(jobs, plans, strict=True):
        backend.check(job, made)
        if Path(made.run_dir).exists():
            raise UsageError(f"{made.run_dir} is there already", "choose another --name, or remove the folder")
    made_records = [Record(made, created_at=time.time(), job=job) for job, made in zip(jobs, plans, strict=True)]
    reserved: list[Record] = []
    try:
        for record in made_records:
            records.reserve(record)
            reserved.append(record)
            _make_folder(record.plan)
        backend.submit_array(plans, step, secrets or {})
    except ClusterError as error:
        for record in reserved:
            records.end(record.plan.job_id, "failed", error.message, error.exit_code)
        raise
    return made_records


def _refuse_held(job: Job, records: Records) -> None:
    """Raise GpusHeldError when a job that runs on this machine has one of the GPUs."""
    for record in records if job.gpus else ():
        held = sorted(set(job.gpus) & set(record.job.gpus))
        try:
            runs = bool(held) and not record.outcome and look(record)[0] in ("joining", "running")
        except ClusterError:  # its engine is gone, and its containers with it
            continue
        if runs:
            name, ids = record.plan.job_id, ", ".join(str(gpu) for gpu in held)
            raise GpusHeldError(
                f"this machine: GPU {ids} is held by the job {name}",
                f"name others: CUDA_VISIBLE_DEVICES=... clusterctl launch, or wait for it: clusterctl wait {name}",
            )


def check_files(job: Job) -> None:
    """Raise a ClusterError naming the first differing files when a host has not what is synced from here.

    Without a container the program sees the host's own files, under the same paths: that they exist is all we ask.
    """

    machines = (job.queue.login,) if job.queue and job.queue.login.login else job.hosts
    if any(node.login for node in machines):
        rsync.require_rsync()
    nodes = [node for node in machines if node.runtime != "none"]
    files.check(nodes, [mount.source for mount in job.mounts if mount.synced])


def start(record: Record, records: Records, secrets: Mapping[str, str] | None = None) -> None:
    """Start a recorded job's nodes: all of them, or none when it raises a ClusterError."""
    lost = [name for name in record.plan.secrets if name not in (secrets or {})]
    if lost:
        raise LaunchError(f"the values of {', '.join(lost)} are kept nowhere, so only the launcher can start this job")
    _make_folder(record.plan)
    try:
        BACKENDS[record.plan.backend].submit(record.plan, secrets)
    except UnreachableError:  # what did not answer in time may start it all the same
        _remove(record, grace_s=0)
        raise
    if records.load(record.plan.job_id).outcome:  # `stop`, in another terminal, before there was anything to stop
        BACKENDS[record.plan.backend].cancel(record.plan, grace_s=0)
        raise LaunchError("it was stopped meanwhile")


def follow(
    record: Record, show: Show, *, wait: Callable[[float], None] = time.sleep, follower: Follower | None = None
) -> Watched:
    """Watch until the job is done, failed, or late for its rendezvous; nothing is stopped here.

    Time in which this process slept counts for nothing: the job's limits are for what was looked at. With the
    `follower` of an earlier call it goes on where that one ended, so that no line is shown twice.
    """
    plan = record.plan
    if follower is None:
        follower = Follower(plan, BACKENDS[plan.backend], record.created_at)
        show.begin(plan)
    silent = 0
    clock = looks.Clock()
    while True:
        now = clock()
        try:
            lines = follower.step(now)
            silent = 0
        except UnreachableError:
            silent += 1
            if silent == 5:
                raise
            lines = []
        verdict = rendezvous.judge(follower.view, now, plan.timeout_s, record.job.stall_timeout_s)
        if verdict == "failed" and rendezvous.failing(follower.view)[0].phase == "lost":
            lines = _before_tracebacks(lines)  # long enough was waited for it to be the first
        elif verdict == "failed":
            # One node's end makes the others fail within moments: look again, so that the first is named and not the
            # first one that we happened to see. Its own last words are shown later, and the others' are its echo.
            wait(2 * TICK_S)
            lines += follower.step(clock())
            while _is_secondary(follower.view) and clock() - now < _CAUSE_S:
                wait(TICK_S)
                lines += follower.step(clock())
            lines = _before_tracebacks(lines)
        show.show(follower.view, lines)
        if verdict in ("done", "failed", "late", "stalled"):
            return Watched(plan, verdict, follower.view, follower.tails, follower.port_was_lost, follower)
        wait(TICK_S)


def _is_secondary(view: JobView) -> bool:
    """Whether no node is known that failed by itself."""
    return rendezvous.is_secondary(rendezvous.failing(view)[0]) and not any(node.silent for node in view.nodes)


def another_port(
    record: Record, watched: Watched, records: Records, secrets: Mapping[str, str] | None = None
) -> Record | None:
    """The next attempt when the port was lost between the check and the start, started; None for any other failure."""
    lost = watched.verdict == "failed" and watched.port_was_lost
    if record.job.port or not lost or watched.view.progress is not None or record.plan.attempt > 3:
        return None
    backend = BACKENDS[record.plan.backend]
    backend.cancel(record.plan, grace_s=FAILED_GRACE_S)
    nodes = record.plan.nodes
    job = replace(record.job, hosts=nodes, nodes=len(nodes)) if record.job.hosts else record.job  # it may have moved
    made = free_plan(job, record.plan.backend, attempt=record.plan.attempt + 1, after=record.plan.master_port)
    record = replace(record, plan=made, created_at=time.time())
    records.update(record)
    start(record, records, secrets)
    return record


def finish(watched: Watched, records: Records) -> tuple[Outcome, list[str]]:
    """Remove what the job left on the machines, bring its results here, note how it ended.

    Gives also what could not be done, a sentence each: a machine that is gone is no reason to lose the others' results.
    """
    record = records.load(watched.plan.job_id)
    outcome: Outcome = "done" if watched.verdict == "done" else "failed"
    # Not cut short by whoever only follows: ranks that were told to stop may be writing.
    failed_s = STOP_GRACE_S if record.outcome == "stopped" else FAILED_GRACE_S
    undone = _remove(record, grace_s=0.0 if watched.verdict == "done" else failed_s)
    undone += _collect(watched.plan)
    _note(watched, outcome, records)
    return records.load(watched.plan.job_id).outcome or outcome, undone


def give_up(watched: Watched, records: Records) -> None:
    """Note that a job has failed for good."""
    _note(watched, "failed", records)


def _note(watched: Watched, outcome: Outcome, records: Records) -> None:
    view, verdict = watched.view, watched.verdict
    records.end(watched.plan.job_id, outcome, report.cause(view, verdict), report.exit_code(view, verdict))


def stop(job_id: str, records: Records) -> tuple[Record, list[str]]:
    """End a job on every node and wait for that; safe to repeat, also for a job that has ended.

    Gives also which results could not be brought here, a sentence each.
    """
    record = records.load(job_id)
    try:
        _stop(record, records, grace_s=STOP_GRACE_S)
    finally:  # also where a machine is gone
        undone = _collect(record.plan)
    return records.load(job_id), undone


def look(record: Record) -> tuple[str, JobView]:
    """A job's state in one word (done, failed, stopped, joining, running) and the view behind it."""
    follower = Follower(record.plan, BACKENDS[record.plan.backend], record.created_at)
    now = time.time()
    if record.outcome and not Path(record.plan.attempt_dir).exists():
        return record.outcome, follower.view
    follower.step(now)
    if record.outcome:
        return record.outcome, follower.view
    words = {"done": "done", "failed": "failed", "met": "running", "waiting": "joining", "late": "joining"}
    return words[rendezvous.judge(follower.view, now, record.plan.timeout_s)], follower.view


def survey(job: Job, plan: Plan, joining: Sequence[Node] = ()) -> dict[str, ClusterError | None]:
    """What keeps each of the job's hosts from running the next attempt after `plan`; None for those that can.

    Those that are `joining` the others need also their image, their files and a way to the master.
    """
    backend = BACKENDS[plan.backend]
    assert isinstance(backend, HostsBackend)
    found = backend.survey(backend.plan(job, attempt=plan.attempt + 1, port=plan.master_port), joining)
    fits = [node for node in joining if found[node.name] is None]
    synced = fanout.each(fits, lambda node: check_files(replace(job, hosts=(node,), queue=None)))
    return found | {name: error for name, error in synced.items() if error is not None}


def unfit_spares(job: Job, backend: str) -> list[str]:
    """Why spares could not take the place of a lost node, as they are now; a sentence each."""
    if not job.spares:
        return []
    hosts = (*job.hosts, *job.spares)
    everyone = replace(job, hosts=hosts, nodes=len(hosts))
    found = survey(everyone, plan(everyone, backend), job.spares)
    unfit = [error for node in job.spares if (error := found[node.name])]
    return [f"no spare as it is now: {with_hint(error.message, error.hint)}" for error in unfit]


def _everywhere(record: Record) -> Plan:
    """The plan, on the nodes of the earlier attempts too."""
    return replace(record.plan, nodes=(*record.plan.nodes, *record.retired))


def _stop(record: Record, records: Records, *, grace_s: float) -> None:
    """Note the stop, so that a launcher that follows sees no failure; a note that cannot be made holds up nothing."""
    try:
        records.end(record.plan.job_id, "stopped")
    finally:
        BACKENDS[record.plan.backend].cancel(_everywhere(records.load(record.plan.job_id)), grace_s=grace_s)


def _remove(record: Record, *, grace_s: float) -> list[str]:
    try:
        BACKENDS[record.plan.backend].cancel(_everywhere(record), grace_s=grace_s)
    except ClusterError as error:
        return [f"{NOT_CLEANED_UP}: {error.message}\nhint: once it answers: clusterctl gc"]
    return []


def _collect(plan: Plan) -> list[str]:
    return looks.collect(plan)


def _before_tracebacks(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The lines that each node wrote before its first traceback."""
    ended: set[str] = set()
    kept = []
    for node, text in lines:
        if "Traceback (most recent call last)" in text:
            ended.add(node)
        if node not in ended:
            kept.append((node, text))
    return kept


def _gpus() -> tuple[int, ...]:
    try:
        listed = LocalShell().run(["nvidia-smi", "-L"], timeout_s=20)
    except UnreachableError:
        return ()
    return config.visible_gpus(listed.out, os.environ.get("CUDA_VISIBLE_DEVICES")) if listed.code == 0 else ()


def _unused_name(job: Job, records: Records, first: int) -> tuple[Job, int]:
    for nth in range(first, 10_000):
        named = replace(job, name=config.numbered(job.name, nth))
        if not records.taken(named.name) and not Path(named.run_root, named.name).exists():
            return named, nth
    raise UsageError(f"10 000 jobs are called {job.name}", "choose another --name")


def free_plan(job: Job, backend: str, *, attempt: int, after: int = 0) -> Plan:
    """The plan with the first port that is free on the master; raises PortTakenError for a taken one asked for."""
    if job.port:
        made = BACKENDS[backend].plan(job, attempt=attempt, port=job.port)
        BACKENDS[backend].check(job, made)
        return made
    ports = [config.auto_port(job.name, nth) for nth in range(_PORT_TRIES)]
    for port in ports[ports.index(after) + 1 :] if after in ports else ports:
        made = BACKENDS[backend].plan(job, attempt=attempt, port=port)
        try:
            BACKENDS[backend].check(job, made)
        except PortTakenError:
            continue
        return made
    raise UsageError(f"{_PORT_TRIES} ports from {ports[0]} on are all taken", "name a free one: --master-port N")


def _make_folder(plan: Plan) -> None:
    try:
        Path(plan.attempt_dir).mkdir(parents=True, exist_ok=False)
        Path(plan.run_dir).parent.joinpath(rsync.RUNS_MARK).write_text(rsync.RUNS_RULE)
    except OSError as error:
        raise LaunchError(
            f"this machine: cannot make the run directory {plan.attempt_dir}: {error.strerror}",
            "choose another place: --run-dir FOLDER",
        ) from error


def image_id(made: Plan) -> str:
    """The short id of the plan's image, "" where no image is used."""
    backend = BACKENDS[made.backend]
    return backend.image_id(made.image) if made.image and isinstance(backend, ComposeBackend) else ""
