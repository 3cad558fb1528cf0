"""Backend slurm: batch scripts that submitit renders, submitted on a login node (this machine, or one over SSH).

The cluster needs neither Python nor this project. What Slurm shares with other batch systems is in backends/batch. A
job is known by its number, and before that by the launch ID in its batch script, which Slurm keeps with it. Sessions
(exec, shell) are job steps of srun.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cluster.agent import scripts
from cluster.backends import script
from cluster.backends.batch import BatchBackend, Programs, refusals
from cluster.backends.batch.login_check import Problem
from cluster.backends.batch.queued import QueuedJob
from cluster.backends.slurm import login_check, options, queue
from cluster.errors import UnreachableError, UsageError
from cluster.spec.model import Device, Job, JobRecord, Machine, Node, Plan, Step
from cluster.transport import reach, ssh_to

#: The maximum age of a cached squeue output. One call per interval serves all jobs of a user.
INTERVAL_S = 3
_ENVIRONMENT = "backends/slurm/environment.sh"
#: Runs srun without its message about the exit code of the command, which srun prints despite --quiet.
_QUIET_STEP = """clear_slurm
"$0" "$@" 2> >(exec sed -u '/^srun: error: .*: task 0: Exited with exit code/d' >&2)
code=$?; wait $!; exit $code"""


class SlurmBackend(BatchBackend):
    """One job of Slurm per job, with one task on each node."""

    name = "slurm"
    title = login_check.TITLE
    programs = Programs("sbatch", "squeue", "scancel", own_jobs="squeue --me", ping=login_check.PING)
    needed = login_check.PROGRAMS
    script_name = "job.sbatch"
    job_scripts = (_ENVIRONMENT, "backends/slurm/job.sh")
    node_script = "backends/slurm/node.sh"
    poll_values: ClassVar[Mapping[str, str | int]] = {"old": INTERVAL_S, "format": queue.FORMAT}
    supports = BatchBackend.supports | {"--array", "--partition", "--account", "--qos"}
    flags = frozenset(options.FLAGS)
    refusals: ClassVar[Mapping[str, str]] = refusals(title)
    section = "cluster.backends.slurm.section:Section"
    doctor = "cluster.backends.slurm.doctor"

    def settings(self, listed: Mapping[str, str], given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the options of sbatch. Raise UsageError for an invalid one."""
        return options.checked({**listed, **given})

    def advice(self, device: Device, procs_per_node: int, settings: Mapping[str, str]) -> list[str]:
        """Return a sentence if the job asks for no CPU cores."""
        if {"cpus-per-gpu", "cpus-per-task", "exclusive"} & settings.keys():
            return []
        more = "cpus-per-gpu=8" if device == "cuda" else f"cpus-per-task={2 * procs_per_node}"
        return [f"CPU cores: the partition's default, often one per node (more: --set {more})"]

    def job_variables(self, job: Job) -> str:
        """Return the line with the variables in which srun finds the job's options."""
        return f"options=({' '.join(options.variables(options.job_options(job)))})"

    def render(self, job: Job, body: str, *, output: str, setup: Sequence[str]) -> str:
        """Return the batch script, as submitit renders it."""
        return _render(job, body, output=output, setup=setup)

    def queued_job(self, line: str) -> QueuedJob | None:
        """Parse a line of squeue."""
        return queue.queued_job(line)

    def hurry(self, login: Machine, job: QueuedJob) -> None:
        """Let a requeued job start in three seconds: Slurm delays it by two minutes, and a site may refuse the change.

        A start within a second after the requeue fails: slurmd has revoked the job's credential.
        """
        if job.state == "PENDING":
            begin = ["scontrol", "update", f"JobId={job.number}", "StartTime=now+3"]
            reach(login).run([*_shell('clear_slurm; exec "$0" "$@"'), *begin], timeout_s=30)

    def readable(self, error: str) -> str:
        """Return the error in a line of the batch script, srun or Pyxis."""
        pyxis = re.match(r"\S+ error: pyxis: +(?:\[ERROR\] )?(.*)", error)
        return f"Pyxis cannot start the container: {pyxis[1]}" if pyxis else super().readable(error)

    def problems(self, job: Job, has: Mapping[str, Sequence[str]], where: str) -> list[Problem]:
        """Return the problems that prevent a submission."""
        return login_check.problems(job, has, where)

    def notes(self, job: Job) -> list[str]:
        """Return sentences about variables on the login node that a job does not inherit. Raises UnreachableError."""
        assert job.queue is not None
        login = job.queue.login
        done = reach(login).run(_shell("report_slurm"), timeout_s=30)
        if done.code:
            raise UnreachableError(f"{login.name}: {done.last_line}")
        return options.inherited(job, done.by_word.get("inherited", ()), login.name)[1]

    def array(self, job: Job, plans: Sequence[Plan], at_once: int) -> Step:
        """Return the script of an array of `plans`, at most `at_once` at a time; `job` is any of its similar jobs."""
        login = plans[0].nodes[0].machine
        folders = [plan.dir_on(login) for plan in plans]
        path = f"{folders[0]}/array.sbatch"
        head = f"# {len(plans)} jobs: each task runs the script of its job."
        text = _render(
            replace(
                job, name=job.name.rpartition("-")[0]
            ),  # NAME-0, NAME-1 and so on are tasks of the array NAME
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
            self.send_script(replace(plan, job=replace(plan.job, secrets=())), {}, ["true"])
        ((path, text),) = step.files.items()
        lines, exported = script.secret_exports(plans[0], secrets)
        folders = [plan.dir_on(login) for plan in plans]
        command = scripts.command(
            "backends/slurm/array", *folders, path=path, secrets=lines, submit=step.argv
        )
        self.run_submission(login, exported + text, command)

    def exec(self, record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return a job step on the node's host that enters its container, on the login node."""
        plan = record.plan
        login = record.plan.nodes[0].machine
        answer = self.ask(plan)
        job = answer.job
        rank = [known.name for known in plan.nodes].index(node.name)
        # squeue's answer may be some seconds old: a job whose nodes are known may be PENDING in it
        if job is None or not job.is_active or rank >= len(answer.hosts):
            raise UsageError(f"{plan.job_id} is not running: {job.state if job else 'it has left the queue'}")
        step = [
            *_shell(_QUIET_STEP),
            "srun",
            f"--jobid={job.number}",
            "--overlap",
            *(["--pty"] if tty else []),
        ]
        step += ["--nodes=1", "--ntasks=1", f"--nodelist={answer.hosts[rank]}"]
        now = replace(plan, attempt=answer.attempt)
        return ssh_to(login).command(
            [*step, *script.exec_command(record.job, now, node, argv, tty=tty)], tty=tty
        )


def _shell(text: str) -> list[str]:
    """Return the beginning of a command that runs a script with the functions of environment.sh."""
    return ["bash", "-c", scripts.text(_ENVIRONMENT) + text]


def _render(job: Job, command: str, *, output: str, setup: Sequence[str], **array: int) -> str:
    """Return a batch script with the job's options, as submitit renders it.

    `setup` has the lines before the command, `output` is the script's log, `array` has submitit's parameters of arrays.
    """
    from submitit.slurm.slurm import _make_sbatch_string  # its import takes 0.1 s

    # Slurm sends USR2 to the batch script alone (B), so long before the time limit.
    signal = f"B:USR2@{max(1, math.ceil(job.grace_s))}"
    more: dict[str, Any] = {"signal": signal, "requeue": True, "output": output}
    more |= {name: value or True for name, value in options.job_options(job).items()}
    parameters: dict[str, Any] = {
        "job_name": job.name,
        "nodes": job.nodes,
        "ntasks_per_node": 1,
        "time": None,
        **array,
    }
    parameters |= {"wckey": None, "stderr_to_stdout": True, "use_srun": False, "additional_parameters": more}
    return _make_sbatch_string(command, ".", setup=list(setup), **parameters)
