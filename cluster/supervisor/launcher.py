"""Launching: turns a request into a job and a plan with a free master port, checks the nodes, starts the job."""

from __future__ import annotations

import errno
import itertools
import os
import pwd
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import choice, token_hex

from cluster.agent.app.node_agent.masking import stays_visible
from cluster.backends import BACKENDS
from cluster.errors import (
    ClusterError,
    GpusHeldError,
    LaunchError,
    NameTakenError,
    PortTakenError,
    UnreachableError,
    UsageError,
    near_or_all,
    with_hint,
)
from cluster.spec import job_name, resolver
from cluster.spec.here import Here
from cluster.spec.model import Gpu, Inventory, Job, JobRecord, Machine, Plan, Step
from cluster.spec.port import auto_port
from cluster.spec.request import Request
from cluster.store import JobStore
from cluster.supervisor import job_end, job_monitor, job_status
from cluster.transport import files, nvidia_smi, parallel, reach, rsync, workdir
from cluster.transport.local import LocalShell

_PORT_TRIES = 20
#: The size in bytes of the largest file that is read because the setup commands name it.
_LARGEST_READ = 16 << 20


def choose_backend(wanted: str, inventory: Inventory | None = None) -> tuple[str, str]:
    """Return the backend, and a note if `auto` falls back to process groups. Raise UsageError for a wrong one.

    With an inventory, `auto` is the inventory's backend.
    """
    listed = inventory.backend if inventory is not None else ""
    named = BACKENDS.get(wanted)
    if inventory is not None and named and named.machines != "here" and wanted != listed:
        raise UsageError(
            f"--backend {wanted}: {inventory.path or 'the inventory'} has backend: {listed}",
            "omit --backend, or name another file: --inventory FILE",
        )
    if wanted == "auto" and inventory is not None:
        return listed, ""
    if named and named.machines == "listed" and inventory is None:
        hint = "clusterctl init gpu-a gpu-b, or --hosts gpu-a,gpu-b"
        raise UsageError(f"--backend {wanted}: no machines given", hint)
    if named:
        return wanted, ""
    if wanted not in ("auto", "here"):
        raise UsageError(f"--backend {wanted}: unknown", near_or_all(wanted, ["auto", *BACKENDS, "here"]))
    best, fallback = itertools.islice(
        (backend for backend in BACKENDS.values() if backend.machines == "here"), 2
    )
    problem = best.problem()
    if problem is None:
        return best.name, ""
    why = problem[0].removeprefix("this machine: ")
    how = f"the nodes are groups of processes (--backend {best.name} makes this an error)"
    return fallback.name, f"no containers, so {how}: {why}"


@dataclass(frozen=True)
class Target:
    """Where the jobs of a launch run, and what was found out about it: asked once, because it asks the engine.

    `here` is this machine, and `notes` are for the user.
    """

    backend: str
    inventory: Inventory | None
    here: Here
    notes: tuple[str, ...] = ()

    def job(self, request: Request) -> tuple[Job, list[str]]:
        """Return the job of a request, and notes for the user. Raise UsageError if the request is contradictory."""
        job, notes = resolver.job(request, self.here, BACKENDS[self.backend], BACKENDS, self.inventory)
        _check_encoding("", asdict(job))
        return job, [*self.notes, *notes]

    def with_gpus(self, gpus: Sequence[Gpu]) -> Target:
        """Return the target with only these GPUs of this machine."""
        return replace(self, here=replace(self.here, gpus=tuple(gpus)))


def choose_target(request: Request, inventory: Inventory | None) -> Target:
    """Return where the jobs of a request run. Raise UsageError for a wrong backend."""
    backend, note = choose_backend(request.backend, inventory)
    return Target(backend, inventory, local_machine(request, backend), (note,) if note else ())


def _check_encoding(name: str, value: object) -> None:
    """Raise UsageError if a text of the job is not UTF-8, as records, plans and scripts are. `name` is its field."""
    if isinstance(value, str):
        if not value.isascii() and (shown := os.fsencode(value).decode(errors="backslashreplace")) != value:
            hint = "rename that file or folder, or write the value in UTF-8"
            raise UsageError(f"{name.replace('_', ' ')}: {shown} is not UTF-8", hint)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _check_encoding(name or str(key), key)
            _check_encoding(name or str(key), each)
    elif isinstance(value, Sequence):
        for each in value:
            _check_encoding(name, each)


def local_machine(request: Request, backend: str = "") -> Here:
    """Return the properties of this machine that a job depends on, with a backend also the user of its containers."""
    return Here(
        cwd=str(Path.cwd()),
        user=BACKENDS[backend].user() if backend else "",
        python=sys.executable,
        gpus=_visible_gpus() if request.device != "cpu" else (),
        variables=tuple(os.environ),
        # Path.exists and Path.is_dir raise for a path without permission and for a name that is too long
        exists=os.path.exists,
        is_folder=os.path.isdir,
        read=_content,
    )


def _content(path: str) -> bytes | None:
    """Return the content of a regular file; b"" if there is none, None if it is too large or not readable.

    A device, a FIFO or a file of /proc is never opened: its content may have no end, or never come.
    """
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            return b""
        return Path(path).read_bytes() if status.st_size <= _LARGEST_READ else None
    except PermissionError:
        return None
    except (OSError, ValueError):  # no such file, or not a path
        return b""


def _visible_gpus() -> tuple[Gpu, ...]:
    try:
        listed = LocalShell().run(["nvidia-smi", "-L"], timeout_s=20)
    except UnreachableError:
        return ()
    return (
        nvidia_smi.visible_gpus(listed.out, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if listed.code == 0
        else ()
    )


def plan(job: Job, backend: str) -> Plan:
    """Return the plan of the job's first attempt. Pure: it does not access the machine."""
    return BACKENDS[backend].plan(job, attempt=1, port=job.port or auto_port(job.name))


def free_plan(job: Job, backend: str, *, attempt: int) -> Plan:
    """Return a checked plan with the job's master port, or else the first one that is free. Raise PortTakenError."""
    ports = [job.port] if job.port else [auto_port(job.name, nth) for nth in range(_PORT_TRIES)]
    while True:
        checked = BACKENDS[backend].plan(job, attempt=attempt, port=ports.pop(0))
        try:
            BACKENDS[backend].check(job, checked)
            return checked
        except PortTakenError:
            if not ports:
                raise


@dataclass
class Launcher:
    """Starts jobs, and records them in `records`. `started` is the last one that runs.

    `secrets` are values by name, which are not stored. `without` are files of secrets, which are not copied with the
    working directory. `report` gets the progress of its copies.
    """

    records: JobStore
    secrets: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    sends_secrets: bool = False
    report: files.Report = lambda *_: None
    started: JobRecord | None = None

    def launch(self, job: Job, backend: str, *, numbered: bool) -> tuple[JobRecord, list[str]]:
        """Check the nodes, record the job and start it on all of them, or on none. Return its record and notes.

        `numbered` appends a number to the job's name if a job of that name exists, also one that another launcher
        starts at this moment. Raises ClusterError if a check failed or a node did not start. After a GpusHeldError
        nothing is left of the job, so that it can be launched again.
        """
        job = replace(job, launch_id=_new_launch_id())
        code = self.check_sources(job)
        _check_gpus(job, self.records)
        names = _unused_names(job, self.records)
        while True:
            try:
                return self._launch(next(names) if numbered else job, backend, code)
            except NameTakenError:  # on a node, by a launcher on another machine, or here a moment ago
                if not numbered:
                    raise

    def _launch(self, job: Job, backend: str, code: Mapping[str, int] | None) -> tuple[JobRecord, list[str]]:
        """Launch the job with its name. `code` is the working directory, if nodes get a copy of it."""
        # Before a machine says it, which does not know how to free the name.
        self.records.refuse_taken(job.name)
        checked = free_plan(job, backend, attempt=1)
        commit = workdir.commit(job.workdir) if job.copies_workdir else ""
        sent = tuple(workdir.secrets(job.workdir, code or ()))
        record = JobRecord(checked, time.time(), job, commit=commit, withheld=self.without, sent_secrets=sent)
        record = replace(record, start_lock=checked.job_id)
        notes = [*BACKENDS[backend].notes(job), *_unknown_gpus(job, self.records)]
        is_reserved = False
        if sent:
            notes.append(f"files that usually hold secrets were sent: {', '.join(sent)}")
        try:
            # Supervised from the start: `attach` must not restart a job that is still starting.
            with self.records.supervise(checked.job_id):
                self._reserve(record)
                is_reserved = True
                try:
                    notes += self._send_files(code, record)
                    record = self.start(record)
                except GpusHeldError:  # by a job that took them after the check
                    self._forget(record)
                    raise
                except ClusterError as error:
                    self.records.end(checked.job_id, "failed", error.message, error.exit_code)
                    raise
        except KeyboardInterrupt:
            if is_reserved:  # some nodes may have started
                job_end.cancel(record, self.records, grace_s=0)
            raise
        self.started = record
        return record, notes

    def _reserve(self, record: JobRecord) -> None:
        """Take the job's name: its record, and its folder on this machine. Raise NameTakenError."""
        folder = Path(record.plan.run_dir)
        self.records.reserve(record)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            self.records.forget(record.plan.job_id)
            raise NameTakenError(f"{folder} already exists", "choose another name: --name NAME") from None
        except OSError:  # `start` says why
            return

    def _forget(self, record: JobRecord) -> None:
        """Remove the record and the folders of a job that has not started."""
        plan = record.plan
        remote = [node for node in plan.machines if plan.is_elsewhere(node)]
        parallel.each(remote, lambda node: reach(node).run(["rm", "-rf", "--", plan.dir_on(node)]))
        shutil.rmtree(plan.run_dir, ignore_errors=True)
        self.records.forget(plan.job_id)

    def start(self, record: JobRecord) -> JobRecord:
        """Start all nodes of a recorded job, and return its record.

        Raise ClusterError, with none of them running, if one does not start.
        """
        plan = record.plan
        backend = BACKENDS[record.plan.backend]
        if absent := ", ".join(name for name in plan.job.secrets if name not in self.secrets):
            raise LaunchError(
                f"secrets are not stored, so only the process that launched the job has {absent}"
            )
        if plan.attempt > 1:
            self._send_files(_code(record), record)
        _make_folder(plan)
        started = replace(record, start_lock="")
        is_submitted = False
        try:
            backend.submit(plan, self.secrets)
            is_submitted = True
            self.records.update(started)
        except ClusterError as error:
            # A node that did not answer in time may still start.
            if is_submitted or isinstance(error, UnreachableError):
                job_end.clean_up(record, grace_s=0)
            raise
        if self.records.load(plan.job_id).outcome:  # `stop` in another process, before the nodes existed
            backend.cancel(plan, grace_s=0)
            raise LaunchError("the job was stopped while it started")
        return started

    def launch_array(self, array: Sequence[Job], backend: str, at_once: int) -> list[JobRecord]:
        """Check and record jobs, and submit them as one job array. Raise ClusterError if none was submitted."""
        array = [replace(job, launch_id=_new_launch_id()) for job in array]
        code = self.check_sources(array[0])
        sent = tuple(workdir.secrets(array[0].workdir, code or ()))
        plans, step = array_plan(array, backend, at_once)
        for job, job_plan in zip(array, plans, strict=True):
            BACKENDS[backend].check(job, job_plan)
            _check_run_dir(job_plan)
        reserved: list[JobRecord] = []
        first = plans[0].job_id
        is_submitted = False
        try:
            with self.records.supervise(first):
                for job, job_plan in zip(array, plans, strict=True):
                    record = JobRecord(job_plan, time.time(), job, withheld=self.without, sent_secrets=sent)
                    record = replace(record, start_lock=first)
                    self.records.reserve(record)
                    reserved.append(record)
                    self._send_files(code, record)
                    _make_folder(record.plan)
                BACKENDS[backend].submit_array(plans, step, self.secrets)
                is_submitted = True
                reserved = [replace(record, start_lock="") for record in reserved]
                for record in reserved:
                    self.records.update(record)
        except ClusterError as error:
            for record in reserved:
                if is_submitted:
                    job_end.clean_up(record, grace_s=0)
                self.records.end(record.plan.job_id, "failed", error.message, error.exit_code)
            raise
        except KeyboardInterrupt:
            for record in reserved:  # Slurm may have accepted the array
                job_end.cancel(record, self.records, grace_s=0)
            raise
        return reserved

    def check_sources(self, job: Job) -> dict[str, int] | None:
        """Check the job's program and files. Return the working directory if nodes get a copy of it.

        Raises UsageError for files with secrets that the user has not decided to send.
        """
        _check_program(job)
        code = workdir.scan(job.workdir, self.without) if job.copies_workdir else None
        if not self.sends_secrets and (secret_files := workdir.secrets(job.workdir, code or ())):
            more = f", and {len(secret_files) - 5} more" if len(secret_files) > 5 else ""
            raise UsageError(
                "the nodes would get copies of files that usually hold secrets, from the working directory "
                f"{job.workdir}: {', '.join(secret_files[:5])}{more}",
                "list them in .clusterignore to leave them out, or !NAME to send one; to send all: --yes",
            )
        check_files(job)
        return code

    def _send_files(self, sizes: Mapping[str, int] | None, record: JobRecord) -> list[str]:
        """Copy the working directory with these files to the job's machines (None: they need none). Return notes."""
        others = sorted(self.records, key=lambda other: other.created_at, reverse=True) if sizes else []
        earlier = [
            other.plan.job_id
            for other in others
            if other.plan.workdir == record.plan.workdir and other.plan.job_id != record.plan.job_id
        ]
        return BACKENDS[record.plan.backend].send_files(record.job, record.plan, sizes, earlier, self.report)


def array_plan(array: Sequence[Job], backend: str, at_once: int) -> tuple[list[Plan], Step]:
    """Return the plans of a job array's jobs, and the step that submits it. Pure."""
    plans = [plan(job, backend) for job in array]
    return plans, BACKENDS[backend].array(array[0], plans, at_once)


def _new_launch_id() -> str:
    """Return 16 random hex digits. The first is a letter, so that YAML does not read a number such as 12e456."""
    return choice("abcdef") + token_hex(8)[1:]


def _code(record: JobRecord) -> dict[str, int] | None:
    """Return the working directory of a later attempt: without files with secrets that are newer than the launch."""
    plan = record.plan
    if not plan.workdir:
        return None
    code = workdir.scan(plan.workdir, record.withheld)
    unasked = {*workdir.secrets(plan.workdir, code)} - {*record.sent_secrets}
    return {name: size for name, size in code.items() if name not in unasked}


def check_files(job: Job) -> None:
    """Raise ClusterError naming the first files that differ between this machine and a host.

    Hosts without a container are excluded: there the program reads the host's own files.
    """
    machines = (job.queue.login,) if job.queue and job.queue.login.login else job.hosts
    if any(node.login for node in machines):
        rsync.require_rsync()
    nodes = [node for node in machines if node.in_container]
    files.check(nodes, [mount.source for mount in job.mounts if mount.synced])


def survey(
    job: Job, plan: Plan, nodes: Sequence[Machine], joining: Sequence[Machine] = ()
) -> dict[str, ClusterError | None]:
    """Check whether each of the nodes can run the attempt after `plan`; it returns None for those that can.

    `joining` are nodes that have not run the job. Their image, files and route to the master are checked too.
    """
    if not nodes:
        return {}
    backend = BACKENDS[plan.backend]
    job = job.on(nodes)
    reports = backend.survey(backend.plan(job, attempt=plan.attempt + 1, port=plan.master_port), joining)
    usable = [node for node in joining if reports[node.name] is None]
    synced = parallel.each(usable, lambda node: check_files(job.on([node])))
    return reports | {name: error for name, error in synced.items() if error is not None}


def unusable_spares(job: Job, backend: str) -> list[str]:
    """Return one sentence for each spare that could not replace a lost node."""
    if not job.spares:
        return []
    answers = survey(job, plan(job, backend), (*job.hosts, *job.spares), job.spares)
    errors = [error for node in job.spares if (error := answers[node.name])]
    return [f"spare not usable: {with_hint(error.message, error.hint)}" for error in errors]


def visible_secrets(secrets: Mapping[str, str]) -> list[str]:
    """Return one sentence for each secret whose value logs show. It names the variable, never the value."""
    why = "is shorter than four characters or a common word, so logs show it"
    return [f"--env {name}: the value {why}" for name, value in secrets.items() if stays_visible(value)]


def _check_program(job: Job) -> None:
    """Raise UsageError if the script of `--command` does not exist. An absolute path may be one of the image."""
    if job.says_ready or job.command[0] == "-m":
        return
    program = job.command[1] if job.command[0] == "--no-python" and job.command[1:] else job.command[0]
    is_in_path = job.command[0] == "--no-python" and "/" not in program
    if not (is_in_path or program.startswith(("-", "/")) or Path(job.workdir, program).exists()):
        hint = "for another folder: --workdir DIR; a module: --command '-m NAME'; a program: --command '--no-python NAME'"
        if program in ("python", "python3", "torchrun"):
            hint = f"leave out {program}: --command 'train.py --lr 0.1'"
        raise UsageError(f"--command: no {program} in {job.workdir}", hint)


def _check_gpus(job: Job, records: JobStore) -> None:
    """Raise GpusHeldError if a running job on this machine uses one of the GPUs."""
    held = gpus_in_use(records) if job.gpus else {}
    for name in dict.fromkeys(held[gpu] for gpu in job.gpus if gpu in held):
        ids = ", ".join(str(gpu) for gpu in job.gpus if held.get(gpu) == name)
        raise GpusHeldError(
            f"this machine: job {name} is using GPU {ids}",
            "wait for it by adding --wait 2h, or choose other GPUs: CUDA_VISIBLE_DEVICES=2,3 clusterctl launch ...",
        )


def gpus_in_use(records: JobStore) -> dict[Gpu, str]:
    """Return this machine's GPUs that recorded jobs use, with the jobs' names."""
    held: dict[Gpu, str] = {}
    for polled in job_monitor.poll_all(
        [record for record in records if record.job.gpus and not record.outcome], records
    ):
        # While its Docker Engine is down, so are its containers.
        if polled.state not in ("done", "failed", "stopped", job_status.UNREACHABLE):
            held |= dict.fromkeys(polled.record.job.gpus, polled.record.plan.job_id)
    return held


def _unknown_gpus(job: Job, records: JobStore) -> list[str]:
    """Return a sentence if this machine's GPUs may be in use by a job whose record cannot be read."""
    names = [str(record.path) for record in records.unreadable()] if job.gpus else []
    return (
        [f"cannot read {', '.join(names)}: if that job is running, it may share GPUs with this one"]
        if names
        else []
    )


def _check_run_dir(plan: Plan) -> None:
    if Path(plan.run_dir).exists():
        raise UsageError(f"{plan.run_dir} already exists", "choose another name: --name NAME")


def _unused_names(job: Job, records: JobStore) -> Iterator[Job]:
    """Yield the job with each of its names, NAME, NAME-2 and so on, that has neither a record nor a folder here."""
    for nth in itertools.count(1):
        named = replace(job, name=job_name.numbered(job.name, nth))
        if not records.is_taken(named.name) and not Path(named.run_root, named.name).exists():
            yield named


def _make_folder(plan: Plan) -> None:
    mark = Path(plan.run_dir).parent / rsync.RUNS_MARK
    try:
        Path(plan.attempt_dir).mkdir(parents=True, exist_ok=False)
        # An existing file may be another user's, who shares the folder.
        with suppress(FileExistsError), mark.open("x") as file:
            file.write(rsync.RUNS_RULE)
    except OSError as error:
        above = next(folder for folder in mark.parents if folder.exists())
        hint = "choose another folder: --run-dir FOLDER"
        why = error.strerror
        if error.errno == errno.EACCES:
            about = above.stat()
            why = f"{above} belongs to {_user_name(about.st_uid)} and has the mode {stat.S_IMODE(about.st_mode):o}"
            hint += f"; or its owner can share it: chmod 1777 {shlex.quote(str(above))}"
        raise LaunchError(
            f"this machine: cannot make the run directory {plan.attempt_dir}: {why}", hint
        ) from error


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
