"""Backend slurm: batch scripts that submitit renders, submitted on a login node (this machine, or one over SSH).

The cluster needs neither Python nor this project. The batch script (job.sh) selects the master and its port,
and requeues itself after a checkpoint. A job is known by its number, and before that by the launch ID in its batch
script, which Slurm keeps with it. Sessions (exec, shell) are job steps of srun.
"""

import math
import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cluster.agent import scripts
from cluster.backends import monitor, poll_script, preflight, script
from cluster.backends.awake_clock import AwakeClock
from cluster.backends.base import Backend, FoundJob, found_on
from cluster.backends.monitor import NodeMonitor
from cluster.backends.slurm import login_node, options, queue
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.spec.model import (
    Device,
    Inventory,
    Job,
    JobRecord,
    Machine,
    Node,
    Plan,
    Step,
    nodes_of,
    this_machine,
)
from cluster.spec.node_status import NodeStatus, NodeStatuses
from cluster.transport import parallel, reach, ssh_to
from cluster.transport.waits import waiting

#: The maximum age of a cached squeue output. One call per interval serves all jobs of a user.
INTERVAL_S = 3
#: Time for Slurm to requeue a job.
_REQUEUE_S = 120.0
_END = "END_OF_NODE_SCRIPT"
#: Runs srun without its message about the exit code of the command, which srun prints despite --quiet.
_QUIET_STEP = """clear_slurm
"$0" "$@" 2> >(exec sed -u '/^srun: error: .*: task 0: Exited with exit code/d' >&2)
code=$?; wait $!; exit $code"""


class SlurmBackend(Backend):
    """One batch script per job, with one task on each node."""

    name, machines = "slurm", "assigned"
    has_login_node = requeues = True
    supports = frozenset({"--image", "--mount", "--set", "--array", "image push", "sync"})
    supports |= {"--partition", "--account", "--qos", "--time", "--prologue", "--run-option"}
    flags = frozenset(options.FLAGS)
    refusals: ClassVar[Mapping[str, str]] = {
        "unequal nodes": "Slurm chooses the machines, so all nodes get the same number",
        "--wait": "Slurm queues the job anyway",
        "--push": "the nodes of a Slurm cluster share one file, which this command makes: clusterctl image sif",
    }
    section = "cluster.backends.slurm.section:Section"
    default_runtime = "apptainer"
    doctor = "cluster.backends.slurm.doctor"

    def __init__(self) -> None:
        self._monitor = NodeMonitor(self._poll, self._poll_all, silent_is_lost=False)

    def login_node(self, image: str) -> Machine:
        """Return this machine."""
        return this_machine(runtime=self.default_runtime if image else "none")

    def settings(self, listed: Mapping[str, str], given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the options of sbatch. Raise UsageError for an invalid one."""
        return options.checked({**listed, **given})

    def advice(self, device: Device, procs_per_node: int, settings: Mapping[str, str]) -> list[str]:
        """Return a sentence if the job asks for no CPU cores."""
        if {"cpus-per-gpu", "cpus-per-task", "exclusive"} & settings.keys():
            return []
        more = "cpus-per-gpu=8" if device == "cuda" else f"cpus-per-task={2 * procs_per_node}"
        return [f"CPU cores: the partition's default, often one per node (more: --set {more})"]

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """Return a plan with one step: the batch script, and the command that submits it. Slurm assigns the hosts."""
        assert job.queue is not None
        login = job.queue.login
        nodes = nodes_of(job, login)
        made = Plan(job, attempt, self.name, nodes, "", job.port)
        run_dir, folder = made.dir_on(login), script.attempt_dir(made, login)
        path, end = f"{folder}/job.sbatch", _END
        node = script.render_in_batch(job, made, login, scripts.text("backends/slurm/node.sh"))
        while end in node:
            end += "_"
        setup = [
            f"# The job {job.name} on {job.nodes} nodes. `sbatch job.sbatch` runs it, with agent.pyz in its folder.",
            scripts.exports(script.identity(job, self.name)),
            # the variables of job.sh
            scripts.variables(run=run_dir, nodes=job.nodes, port=job.port)
            + scripts.variables(max_restarts=max(0, job.max_restarts - attempt + 1), first_attempt=attempt)
            + scripts.variables(requeue_after=f"{queue.ENDED_WITH_CHECKPOINT} {queue.ENDED_WITHOUT_CODE}")
            + f"options=({' '.join(options.variables(options.job_options(job)))})",
            f"node=$(cat <<'{end}'\n{node}{end}\n)",
        ]
        body = scripts.text("backends/slurm/environment.sh", "backends/slurm/job.sh")
        text = _render(job, body, output=f"{run_dir}/slurm.log", setup=setup)
        needs = script.needs(job, login)
        return replace(made, steps=(Step(login.name, {path: text}, ("sbatch", path), needs, f"{folder}/agent.pyz"),))

    def check(self, job: Job, plan: Plan) -> None:
        """Run the preflight check on the login node. Raises UsageError for what is missing, or NameTakenError."""
        assert job.queue is not None
        login = job.queue.login
        (step,) = plan.steps
        new = plan.dir_on(login) if login.login and plan.attempt == 1 else ""
        run_dir = login.run_dir or job.run_root
        name = plan.job_id if plan.attempt == 1 else ""
        command = login_node.check_command(job, run_dir=run_dir, new=new, name=name, needs=step.needs)
        done = reach(login).run(command, timeout_s=60)
        if done.code:
            raise UnreachableError(f"{login.name}: {done.last_line}")
        errors = [UsageError(*problem) for problem in login_node.problems(job, done.by_word, login.name)]
        preflight.refuse([*errors, *preflight.conflicts(plan, login, done.out.splitlines())])

    def notes(self, job: Job) -> list[str]:
        """Return sentences about variables on the login node that a job does not inherit. Raises UnreachableError."""
        assert job.queue is not None
        login = job.queue.login
        done = reach(login).run(_shell("report_slurm"), timeout_s=30)
        if done.code:
            raise UnreachableError(f"{login.name}: {done.last_line}")
        return options.inherited(job, done.by_word.get("inherited", ()), login.name)[1]

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Submit the script. Raises LaunchError with sbatch's message."""
        self._send(plan, secrets, plan.steps[0].argv)

    def _send(self, plan: Plan, secrets: Mapping[str, str], argv: Sequence[str]) -> None:
        """Write a job's files to the cluster, and run the command that submits it."""
        login = plan.nodes[0].machine
        lines, text = script.payload(plan, plan.steps[0], secrets)
        folders = {"dir": script.attempt_dir(plan, login), "folder": plan.dir_on(login)}
        self._run(login, text, scripts.command("backends/slurm/submit", *argv, secrets=lines, **folders))

    def _run(self, login: Machine, text: str, command: Sequence[str]) -> None:
        """Run a script that submits `text`. Raises LaunchError with sbatch's message if it fails."""
        # In a thread: Ctrl-C waits for the submission, which would escape the scancel after it.
        done = parallel.all_of([login], lambda node: reach(node).run(command, stdin=text))[login.name]
        if done.code:
            lines = [
                re.sub(r"^sbatch: (error: |fatal: )?", "", line)
                for line in done.err.splitlines()
                if "--help" not in line
            ]
            why = f"{'the login node' if login.is_listed else login.name}: sbatch: {'; '.join(lines) or done.last_line}"
            hint = "to see the batch script, run the same command with plan instead of launch"
            if "unrecognized option" in why:
                hint = "correct it in --set or in the section slurm of cluster.yaml; `man sbatch` lists all options"
            raise LaunchError(why, hint)

    def array(self, job: Job, plans: Sequence[Plan], at_once: int) -> Step:
        """Return the script of an array of `plans`, at most `at_once` at a time; `job` is any of its similar jobs."""
        login = plans[0].nodes[0].machine
        folders = [plan.dir_on(login) for plan in plans]
        path = f"{folders[0]}/array.sbatch"
        head = f"# {len(plans)} jobs: each task runs the script of its job."
        text = _render(
            replace(job, name=job.name.rpartition("-")[0]),  # NAME-0, NAME-1 and so on are tasks of the array NAME
            "folder=${folders[$SLURM_ARRAY_TASK_ID]}\n"
            'exec bash "$folder/attempt-1/job.sbatch" >> "$folder/slurm.log" 2>&1',
            output=f"{folders[0]}/array-%a.log",
            setup=[
                head,
                *(f"# launch {plan.job.launch_id}" for plan in plans),
                "folders=(",
                *map(shlex.quote, folders),
                ")",
            ],
            map_count=len(plans),
            array_parallelism=at_once,
        )
        return Step(login.name, {path: text}, ("sbatch", path))

    def submit_array(self, plans: Sequence[Plan], step: Step, secrets: Mapping[str, str]) -> None:
        """Submit the jobs with the script of `array`. Raises LaunchError with sbatch's message."""
        login = plans[0].nodes[0].machine
        for plan in plans:
            self._send(replace(plan, job=replace(plan.job, secrets=())), {}, ["true"])
        ((path, text),) = step.files.items()
        lines, exported = script.secret_exports(plans[0], secrets)
        folders = [plan.dir_on(login) for plan in plans]
        command = scripts.command("backends/slurm/array", *folders, path=path, secrets=lines, submit=step.argv)
        self._run(login, exported + text, command)

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """Return statuses from the nodes' exit-code files, or else from squeue. Copy logs from a remote cluster."""
        return self._monitor.statuses(plan)

    def observe_all(self, plans: Sequence[Plan]) -> list[Sequence[NodeStatus] | ClusterError]:
        """Run one command on each login node, which asks squeue once."""
        return [*self._monitor.statuses_of(plans)]

    def cancel(self, plan: Plan, *, grace_s: float, only_attempt: bool = False) -> None:
        """Cancel the job with scancel, and wait until it ends. Raises ClusterError if it is still in the queue."""
        login = plan.nodes[0].machine
        # The batch script needs some seconds to forward the signal.
        grace = max(3, math.ceil(grace_s)) if grace_s else 0
        launched = {"job": plan.job_id, "launch": plan.job.launch_id}
        command = scripts.command("backends/slurm/cancel", grace=grace, folder=plan.dir_on(login), **launched)
        with waiting(f"Slurm to end {plan.job_id}", grace_s + 120):
            done = reach(login).run(command, timeout_s=grace_s + 120)
        if done.code:
            raise UnreachableError(f"scancel: {done.last_line}", f"clusterctl stop {plan.job_id}")
        if done.out.strip():
            left = ", ".join(done.out.splitlines())
            raise ClusterError(f"{left} of {plan.job_id} is still in the queue after scancel", "squeue --me")

    def jobs_on(self, inventory: Inventory, supervised: Collection[str]) -> dict[str, list[FoundJob] | ClusterError]:
        """Return what its jobs have on the login node. They run while the queue has them, as it may restart them."""
        (login,) = inventory.machines

        def look(machine: Machine) -> list[FoundJob]:
            found = found_on(machine, self.name, self.engines)
            pairs = {each.launch_id: each.job for each in found}
            words = [word for pair in pairs.items() for word in pair]
            done = reach(machine).run(scripts.command("backends/slurm/queued", *words), timeout_s=60)
            if done.code:
                raise UnreachableError(f"{machine.name}: squeue: {done.last_line}", "scontrol ping")
            running = {*done.out.split(), *supervised}
            return [replace(each, runs=each.launch_id in running) for each in found]

        return parallel.each([login], look)

    def remove(self, inventory: Inventory, found: FoundJob) -> None:
        """Cancel the job, and remove what it has on the login node. Raises ClusterError."""
        (login,) = inventory.machines
        launched = {"job": found.job, "launch": found.launch_id}
        done = reach(login).run(scripts.command("backends/slurm/cancel", grace=0, folder="", **launched), timeout_s=120)
        if done.code or done.out.strip():
            raise ClusterError(f"{login.name}: {found.job} is still in the queue: {done.out.strip() or done.last_line}")
        super().remove(inventory, found)

    def exec(self, record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return a job step on the node's host that enters its container, on the login node."""
        plan, login = record.plan, record.plan.nodes[0].machine
        found, attempt, hosts, *_ = self._query(plan, login)
        rank = [each.name for each in plan.nodes].index(node.name)
        # squeue's answer may be some seconds old: a job whose nodes are known may be PENDING in it
        if found is None or not found.is_active or rank >= len(hosts):
            raise UsageError(f"{plan.job_id} is not running: {found.state if found else 'it has left the queue'}")
        step = [*_shell(_QUIET_STEP), "srun", f"--jobid={found.number}", "--overlap", *(["--pty"] if tty else [])]
        step += ["--nodes=1", "--ntasks=1", f"--nodelist={hosts[rank]}"]
        now = replace(plan, attempt=attempt)
        return ssh_to(login).command([*step, *script.exec_command(record.job, now, node, argv, tty=tty)], tty=tty)

    def requeued(self, plan: Plan) -> Plan | None:
        """Return the next attempt if Slurm has requeued the job, else None. Raises ClusterError if it was cancelled."""
        with waiting(f"Slurm to requeue {plan.job_id}", _REQUEUE_S):
            return self._requeued(plan)

    def _requeued(self, plan: Plan) -> Plan | None:
        clock = AwakeClock()
        until = clock() + _REQUEUE_S
        while clock() < until:
            try:
                found, attempt, *_ = self._query(plan, plan.nodes[0].machine)
                if found is not None and found.state == "PENDING":
                    # Slurm delays a requeued job by two minutes. A site may refuse an earlier start. A start within a
                    # second after the requeue fails: slurmd has revoked the job's credential.
                    begin = ["scontrol", "update", f"JobId={found.number}", "StartTime=now+3"]
                    reach(plan.nodes[0].machine).run([*_shell('clear_slurm; exec "$0" "$@"'), *begin], timeout_s=30)
            except UnreachableError:  # an error now would cancel the requeued job
                if clock() + 1 > until:
                    raise
                time.sleep(1)
                continue
            if attempt > plan.attempt or (found is not None and queue.is_pending(found)):
                return replace(plan, attempt=max(attempt, plan.attempt + 1))
            if found is not None and found.state == "CANCELLED":
                raise ClusterError(queue.CANCELLED)
            if found is None or not found.is_active:
                return None
            time.sleep(1)
        return None

    def newest(self, plan: Plan) -> Plan | None:
        """Return the plan of the attempt that Slurm runs, has in its queue or ran last. None: that is not known yet."""
        found, attempt, *_ = self._query(plan, plan.nodes[0].machine)
        if queue.is_requeued(plan, found, attempt):
            return replace(plan, attempt=max(attempt, plan.attempt + 1))
        return None if found is not None and found.is_active else plan

    def _query(self, plan: Plan, login: Machine) -> "_Answer":
        """Return the job, its attempt, the hosts, the batch script's error, and the nodes' own statuses."""
        return _answer(poll_script.poll(plan, login, _POLL))

    def _poll(self, plan: Plan, login: Machine) -> NodeStatuses:
        return _statuses(plan, self._query(plan, login))

    def _poll_all(self, plans: Sequence[Plan], login: Machine) -> list[NodeStatuses | ClusterError]:
        made: list[NodeStatuses | ClusterError] = []
        for plan, polled in zip(plans, poll_script.poll_all(plans, login, _POLL), strict=True):
            try:
                made.append(_statuses(plan, _answer(polled)))
            except Exception as error:  # one job hides no other
                made.append(monitor.in_words(error))
        return made


def _words(plan: Plan, login: Machine) -> list[str]:
    return [plan.job_id, plan.dir_on(login), str(len(plan.nodes_on(login)))]


_POLL = poll_script.Script("backends/slurm/poll", 4, _words, {"old": INTERVAL_S, "format": queue.FORMAT})
#: The job in squeue, its attempt, the hosts, the batch script's error, and the nodes' own statuses.
_Answer = tuple[queue.Row | None, int, Sequence[str], str, NodeStatuses]


def _answer(polled: poll_script.Answer) -> _Answer:
    """Parse what poll.sh prints of a job. Raises UnreachableError if Slurm does not answer."""
    (line, running, refused, error), own = polled
    if refused and not line:
        raise UnreachableError(f"Slurm does not answer: {refused}", "scontrol ping")
    attempt, *hosts = running.split() or ["0"]
    return queue.row(line), int(attempt) if attempt.isdigit() else 0, hosts, _error(error), own


def _error(line: str) -> str:
    """Return the error in a line of the batch script, srun or Pyxis."""
    pyxis = re.match(r"\S+ error: pyxis: +(?:\[ERROR\] )?(.*)", line)
    return f"Pyxis cannot start the container: {pyxis[1]}" if pyxis else line.removeprefix("error: ")


def _statuses(plan: Plan, answer: _Answer) -> NodeStatuses:
    found, attempt, hosts, error, own = answer
    statuses = queue.statuses(plan, found, attempt, hosts, [own[node.name] for node in plan.nodes], error)
    return {status.node: status for status in statuses}


def _shell(text: str) -> list[str]:
    """Return the beginning of a command that runs a script with the functions of backends/slurm/environment.sh."""
    return ["bash", "-c", scripts.text("backends/slurm/environment.sh") + text]


def _render(job: Job, command: str, *, output: str, setup: Sequence[str], **array: int) -> str:
    """Return a batch script with the job's options, as submitit renders it.

    `setup` has the lines before the command, `output` is the script's log, `array` has submitit's parameters of arrays.
    """
    from submitit.slurm.slurm import _make_sbatch_string  # its import takes 0.1 s

    # Slurm sends USR2 to the batch script alone (B), so long before the time limit.
    signal = f"B:USR2@{max(1, math.ceil(job.grace_s))}"
    more: dict[str, Any] = {"signal": signal, "requeue": True, "output": output}
    more |= {name: value or True for name, value in options.job_options(job).items()}
    parameters: dict[str, Any] = {"job_name": job.name, "nodes": job.nodes, "ntasks_per_node": 1, "time": None, **array}
    parameters |= {"wckey": None, "stderr_to_stdout": True, "use_srun": False, "additional_parameters": more}
    return _make_sbatch_string(command, ".", setup=list(setup), **parameters)
