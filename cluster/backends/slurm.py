"""Jobs as batch scripts of Slurm, through submitit, submitted on a login node: this machine, or one behind SSH.

submitit renders the script, which needs neither Python nor this project on the cluster. The script finds its nodes and
its port, and requeues itself after a checkpoint. A job is found in the queue by its name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import submitit

from cluster import logs, looks, quoting, readiness, resources, script, slurm
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.looks import Looks, Seen
from cluster.model import Job, Mount, Node, NodeStatus, Plan, Step, plan_of
from cluster.runtimes import RUNTIMES
from cluster.shells import Completed, Shell

#: So old may squeue's answer be: the controller is asked once in that time for all jobs of a user.
INTERVAL_S = 3
#: How long Slurm may take to put a job back into its queue.
_REQUEUE_S = 120.0


#: Slurm sends USR2 to the batch script alone (B) so long before the time limit, in seconds; submitit's default, too.
_SIGNAL = "B:USR2@90"
_END = "END_OF_NODE_SCRIPT"


class Executor(submitit.SlurmExecutor):
    """submitit's executor for a shell script: nothing is pickled, and the script is submitted through a `Shell`."""

    @classmethod
    def affinity(cls) -> int:
        """Available everywhere: this machine needs no Slurm to render a script."""
        return 2

    def text(self, command: str) -> str:
        """The batch script, as submitit writes it."""
        return str(self._make_submission_file_text(command, ""))

    def submission(self, path: str) -> list[str]:
        """The command that submits the script at `path`."""
        return list(self._make_submission_command(Path(path)))


def executor(job: Job, *, run_dir: str, setup: Sequence[str]) -> Executor:
    """The executor with the job's options; `setup` are the lines before the command. Raises UsageError."""
    assert job.queue is not None
    more: dict[str, Any] = {"signal": _SIGNAL, "requeue": True, "output": f"{run_dir}/slurm.log"}
    if job.device == "cuda" and not {"gres", "gpus-per-node"} & {*job.queue.options}:
        more["gpus-per-node"] = job.procs_per_node
    more |= {name: value or True for name, value in job.queue.options.items()}
    made = Executor(run_dir)
    try:
        made.update_parameters(
            job_name=job.name,
            nodes=job.nodes,
            ntasks_per_node=1,
            time=None,
            wckey=None,
            stderr_to_stdout=True,
            use_srun=False,
            setup=list(setup),
            additional_parameters=more,
        )
    except ValueError as error:
        raise UsageError(f"--slurm: {error}") from error
    return made


class SlurmBackend:
    """One batch script, one task of it on each node."""

    name = "slurm"

    def __init__(self, reach: Callable[[Node], Shell]) -> None:
        self._reach = reach
        self._looks = Looks(reach, self._look, loses=False)

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step: the batch script, and the command that submits it. The nodes get their hosts from Slurm."""
        assert job.queue is not None
        login = job.queue.login
        nodes = tuple(replace(login, name=f"node-{rank}", gpus=()) for rank in range(job.nodes))
        inside = login.runtime != "none"
        made = plan_of(job, self.name, nodes, attempt=attempt, master=("", job.port), in_containers=inside)
        return replace(made, steps=(_step(job, made),))

    def check(self, job: Job, plan: Plan) -> None:
        """Raise UsageError for what the cluster has not: a partition, nodes, GPUs, the image, a folder to write to.

        NameTakenError where it has a job of this name.
        """
        assert job.queue is not None
        login = job.queue.login
        (step,) = plan.steps
        new = plan.dir_on(login) if login.login and plan.attempt == 1 else ""
        run_dir = login.run_dir or job.run_root
        words = [login.runtime, plan.image, run_dir, new, plan.job_id if plan.attempt == 1 else "", *step.needs]
        check = resources.text("agent/common.sh", "agent/slurm_check.sh")
        done = self._reach(login).run(["bash", "-c", check, "check", *words], timeout_s=60)
        if done.code:
            raise UnreachableError(f"{readiness.place(login)}: {done.last_line}")
        has: dict[str, list[str]] = {}
        for line in done.out.splitlines():
            word, _, text = line.partition(" ")
            has.setdefault(word, []).append(text)
        found = slurm.problems(job, has, readiness.place(login))
        if found:
            raise UsageError(
                "\n       ".join(dict.fromkeys(what for what, _ in found)),
                "\n      ".join(dict.fromkeys(hint for _, hint in found if hint)),
            )
        readiness.refuse_taken(plan.job_id, {readiness.place(login): done.out.splitlines()})

    def submit(self, plan: Plan, secrets: Mapping[str, str] | None = None) -> None:
        """Submit the script; raises LaunchError with sbatch's message."""
        self._send(plan, secrets or {}, plan.steps[0].argv)

    def _send(self, plan: Plan, secrets: Mapping[str, str], argv: Sequence[str]) -> None:
        """Write the files of a job to the cluster and run the command that submits it."""
        (step,) = plan.steps
        ((path, text),) = step.files.items()
        login = plan.nodes[0]
        head = quoting.exports({name: secrets[name] for name in plan.secrets})
        head += "\n" if head else ""
        agent = resources.text("agent/agent.py")
        words = [path.rpartition("/")[0], plan.dir_on(login), str(head.count("\n")), str(agent.count("\n"))]
        submit = ["bash", "-c", resources.text("agent/slurm_submit.sh"), "submit", *words, *argv]
        done = self._reach(login).run(submit, stdin=head + agent + text)
        if done.code or argv == step.argv:
            _submitted(login, done)

    def array(self, job: Job, plans: Sequence[Plan], at_once: int) -> Step:
        """The batch script that runs the jobs of `plans` as the tasks of an array, at most `at_once` at a time: pure.

        `job` is any of them: their nodes and options are the same.
        """
        login = plans[0].nodes[0]
        folders = [plan.dir_on(login) for plan in plans]
        setup = [
            f"# {len(plans)} jobs: each task runs the script of its job.",
            "folders=(",
            *map(shlex.quote, folders),
            ")",
        ]
        # NAME-0, NAME-1 and so on are tasks of the array NAME.
        made = executor(replace(job, name=job.name.rpartition("-")[0]), run_dir=folders[0], setup=setup)
        made.parameters.update(map_count=len(plans), array_parallelism=at_once)
        made.parameters["additional_parameters"]["output"] = f"{folders[0]}/array-%a.log"
        path = f"{folders[0]}/array.sbatch"
        text = made.text(
            "folder=${folders[$SLURM_ARRAY_TASK_ID]}\n"
            'exec bash "$folder/attempt-1/job.sbatch" >> "$folder/slurm.log" 2>&1'
        )
        return Step(login.name, {path: text}, tuple(made.submission(path)))

    def submit_array(self, plans: Sequence[Plan], step: Step, secrets: Mapping[str, str]) -> None:
        """Submit the jobs with the script of `array`; raises LaunchError with sbatch's message."""
        login = plans[0].nodes[0]
        for plan in plans:
            self._send(plan, secrets, ["true"])
        ((path, text),) = step.files.items()
        words = [path, *(plan.dir_on(login) for plan in plans), "--", *step.argv]
        submit = ["bash", "-c", resources.text("agent/slurm_array.sh"), "array", *words]
        _submitted(login, self._reach(login).run(submit, stdin=text))

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """From each node's exit-code file where there is one, else from squeue."""
        return self._looks.statuses(plan)

    def logs(self, plan: Plan, offsets: Mapping[str, int]) -> Mapping[str, bytes]:
        """From the run directory here: `observe` adds what the cluster's logs have, where that is elsewhere."""
        return logs.read(plan, offsets)

    def cancel(self, plan: Plan, *, grace_s: float) -> None:
        """`scancel`, and wait until Slurm has ended it; raises ClusterError for what stays."""
        login = plan.nodes[0]
        # The batch script needs some seconds to pass the signal on, whatever time the ranks get.
        words = [plan.job_id, str(max(3, int(grace_s)) if grace_s else 0), plan.dir_on(login)]
        cancel = ["bash", "-c", resources.text("agent/slurm_cancel.sh"), "cancel", *words]
        done = self._reach(login).run(cancel, timeout_s=grace_s + 120)
        if done.code:
            raise UnreachableError(f"scancel: {done.last_line}", f"clusterctl stop {plan.job_id}")
        if done.out.strip():
            raise ClusterError(f"{', '.join(done.out.splitlines())} of {plan.job_id} does not end", "squeue --me")

    def requeued(self, plan: Plan, wait: Callable[[float], None]) -> Plan | None:
        """The next attempt, where Slurm makes it by itself; None where the job has left the queue.

        Raises ClusterError when somebody has cancelled it.
        """
        clock = looks.Clock()
        until = clock() + _REQUEUE_S
        while clock() < until:
            try:
                found, attempt, *_ = self._ask(plan, plan.nodes[0])[0]
                if found is not None and found.state == "PENDING":
                    # Slurm lets a job that comes back wait for two minutes; refused where the site wants that
                    begin = ["scontrol", "update", f"JobId={found.number}", "StartTime=now"]
                    self._reach(plan.nodes[0]).run(begin, timeout_s=30)
            except UnreachableError:  # given up now, the job that Slurm has put back would be cancelled
                if clock() + 1 > until:
                    raise
                wait(1.0)
                continue
            if attempt > plan.attempt or (found is not None and slurm.waits(found)):
                return replace(plan, attempt=max(attempt, plan.attempt + 1))
            if found is not None and found.state == "CANCELLED":
                raise ClusterError(slurm.CANCELLED)
            if found is None or not found.lasts:
                return None
            wait(1.0)
        return None

    def _ask(
        self, plan: Plan, login: Node
    ) -> tuple[tuple[slurm.Row | None, int, Sequence[str], str], Mapping[str, looks.Answer]]:
        words = [plan.job_id, str(looks.LOG_CHUNK), slurm.FORMAT, plan.dir_on(login), str(INTERVAL_S)]
        poll = resources.text("agent/common.sh", "agent/slurm_poll.sh")
        head, seen = looks.ask(self._reach(login), plan, login, poll, words, head=5)
        line, accounted, running, refused, error = head
        if refused and not line:
            raise UnreachableError(f"Slurm does not answer: {refused}", "scontrol ping")
        attempt, *hosts = running.split() or ["0"]
        return (
            slurm.row(line) or _accounted(plan, accounted),
            int(attempt),
            hosts,
            error.removeprefix("error: "),
        ), seen

    def _look(self, plan: Plan, login: Node) -> Seen:
        (found, attempt, hosts, error), answers = self._ask(plan, login)
        said = [looks.status(node.name, answers[node.name]) for node in plan.nodes]
        return {status.node: status for status in slurm.statuses(plan, found, attempt, hosts, said, error)}


def _submitted(login: Node, done: Completed) -> str:
    """The number of the job that sbatch has submitted; raises LaunchError with sbatch's message."""
    if done.code:
        lines = [re.sub(r"^sbatch: (error: )?", "", line) for line in done.err.splitlines() if "--help" not in line]
        raise LaunchError(
            f"{readiness.place(replace(login, name='the login node'))}: sbatch: {'; '.join(lines) or done.last_line}",
            "the script is printed by the same command with plan instead of launch",
        )
    try:
        return str(Executor("")._get_job_id_from_submission_command(done.out))
    except submitit.core.utils.FailedSubmissionError as error:
        raise LaunchError(f"sbatch: {str(error).splitlines()[0]}") from error


def _accounted(plan: Plan, line: str) -> slurm.Row | None:
    """The job as sacct shows it, None without accounting: squeue forgets a job some minutes after its end."""
    for number, info in submitit.SlurmJob.watcher.read_info(f"JobID|State|ExitCode|NodeList\n{line}").items():
        state = info["State"].split()[0]
        return slurm.Row(plan.job_id, number, state, 0, info["ExitCode"], "", info["NodeList"], "")
    return None


def _step(job: Job, plan: Plan) -> Step:
    assert job.queue is not None
    login = job.queue.login
    run_dir = plan.dir_on(login)
    mounts = [looks.mounted(login, mount) for mount in job.mounts]
    agent = f"{run_dir}/attempt-{plan.attempt}/agent.py"
    node = script.render_in_batch(
        job,
        login,
        run_dir=run_dir,
        agent=agent,
        runtime=RUNTIMES[login.runtime],
        mounts=[Mount(run_dir, run_dir, read_only=False), *mounts] if login.runtime != "none" else (),
    )
    path = f"{run_dir}/attempt-{plan.attempt}/job.sbatch"
    needs = tuple(mount.source if login.runtime != "none" else mount.target for mount in mounts)
    made = executor(job, run_dir=run_dir, setup=_setup(job, node, run_dir=run_dir, attempt=plan.attempt))
    text = made.text(resources.text("agent/batch.sh"))
    return Step(login.name, {path: text}, tuple(made.submission(path)), needs, agent)


def _setup(job: Job, node: str, *, run_dir: str, attempt: int) -> list[str]:
    """The variables of agent/batch.sh; `node` is the script of each node, `attempt` the first one that it makes."""
    end = _END
    while end in node:
        end += "_"
    values = {
        "run": run_dir,
        "nodes": str(job.nodes),
        "port": str(job.port),
        "max_restarts": str(max(0, job.max_restarts - attempt + 1)),
        "first_attempt": str(attempt),
    }
    return [
        f"# The job {job.name} on {job.nodes} nodes. `sbatch job.sbatch` runs it, with agent.py in its folder.",
        *(f"{name}={shlex.quote(text)}" for name, text in values.items()),
        f"node=$(cat <<'{end}'\n{node}{end}\n)",
    ]
