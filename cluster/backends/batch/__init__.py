"""What batch systems share. A job is one script, which the system starts on hosts that it chooses, and may start again.

The script and the agent are sent to the login node, and nothing else is needed there. The body of the script is job.sh,
which selects the master and its port, starts a node's script on each host, and requeues the job after a checkpoint or
the loss of a host. It calls functions that the batch system's own job.sh defines. The folder of a backend has

| file | what |
|---|---|
| `job.sh`, `node.sh` | see job.sh and node.sh here: the functions of a job, and the rank and GPUs of a node |
| `common.sh` | functions of the scripts on the login node; see check.sh, submit.sh and cancel.sh here |
| `poll.sh` | prints of each job the queue's line, its attempt and hosts, the queue's error, and the script's error |
"""

import abc
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cluster.agent import scripts
from cluster.backends import node_monitor, poll_script, preflight, script
from cluster.backends.awake_clock import AwakeClock
from cluster.backends.base import Backend, FoundJob, found_on
from cluster.backends.batch import login_check, queued
from cluster.backends.batch.queued import QueuedJob
from cluster.backends.node_monitor import NodeMonitor
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.spec.counts import counted
from cluster.spec.model import Inventory, Job, Machine, Plan, Step, nodes_of, this_machine
from cluster.spec.node_status import NodeStatus, NodeStatuses
from cluster.transport import parallel, reach
from cluster.transport.waits import waiting

#: Time for a batch system to requeue a job.
_REQUEUE_S = 120.0
_END = "END_OF_NODE_SCRIPT"


@dataclass(frozen=True)
class Programs:
    """The programs of a batch system, and the commands that hints name."""

    submit: str
    queue: str
    cancel: str
    own_jobs: str
    ping: str


@dataclass(frozen=True)
class Answer:
    """What a poll says of a job: its entry in the queue, its attempt (0: none yet) and that one's hosts.

    `error` is the error of the batch script, and `own` has the nodes' own statuses.
    """

    job: QueuedJob | None
    attempt: int
    hosts: Sequence[str]
    error: str
    own: NodeStatuses


def refusals(title: str) -> dict[str, str]:
    """Return why no batch system supports some options."""
    return {
        "unequal nodes": f"{title} chooses the machines, so all nodes get the same number",
        "--wait": f"{title} queues the job anyway",
        "--push": f"the nodes of a {title} cluster share one file, which this command makes: clusterctl image sif",
    }


class BatchBackend(Backend):
    """One batch script per job, with one task on each node."""

    machines = "assigned"
    has_login_node = requeues = True
    supports = frozenset(
        {"--image", "--mount", "--set", "--time", "--prologue", "--run-option", "image push", "sync"}
    )
    default_runtime = "apptainer"

    #: The batch system's name in sentences.
    title: ClassVar[str]
    programs: ClassVar[Programs]
    #: The programs that the login node needs.
    needed: ClassVar[Sequence[str]]
    #: The name of the script, whose log is NAME.log.
    script_name: ClassVar[str]
    #: The texts before job.sh and before node.sh.
    job_scripts: ClassVar[Sequence[str]]
    node_script: ClassVar[str]
    #: The variables of poll.sh.
    poll_values: ClassVar[Mapping[str, str | int]] = {}

    def __init__(self) -> None:
        self._script = poll_script.Script(f"backends/{self.name}/poll", 4, _words, self.poll_values)
        self._monitor = NodeMonitor(self._poll, self._poll_all, silent_is_lost=False)

    @abc.abstractmethod
    def render(self, job: Job, body: str, *, output: str, setup: Sequence[str]) -> str:
        """Return a batch script: its directives, the lines of `setup`, and the command `body`.

        The directives ask for SIGUSR2 the job's grace before its time limit, and `output` is the script's log.
        """

    @abc.abstractmethod
    def queued_job(self, line: str) -> QueuedJob | None:
        """Parse the queue's line of a job, as poll.sh prints it; None if it is empty."""

    def job_variables(self, job: Job) -> str:
        """Return lines that set further variables for the backend's job.sh."""
        return ""

    def hurry(self, login: Machine, job: QueuedJob) -> None:
        """Ask the batch system to start a requeued job soon, if it delays such jobs."""

    def readable(self, error: str) -> str:
        """Return the error in a line of the batch script's log."""
        return error.removeprefix("error: ")

    def login_node(self, image: str) -> Machine:
        """Return this machine."""
        return this_machine(runtime=self.default_runtime if image else "none")

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """Return a plan with one step: the batch script, and the command that submits it, which assigns the hosts."""
        assert job.queue is not None
        login = job.queue.login
        made = Plan(job, attempt, self.name, nodes_of(job, login), "", job.port)
        folder = script.attempt_dir(made, login)
        path = f"{folder}/{self.script_name}"
        body = scripts.text(*self.job_scripts, "agent/wait.sh", "backends/batch/job.sh")
        output = f"{made.dir_on(login)}/{self.name}.log"
        text = self.render(job, body, output=output, setup=self._setup(job, made, login))
        step = Step(login.name, {path: text}, (self.programs.submit, path), script.needs(job, login))
        return replace(made, steps=(replace(step, agent=f"{folder}/agent.pyz"),))

    def _setup(self, job: Job, plan: Plan, login: Machine) -> list[str]:
        """Return the variables of job.sh."""
        node = script.render_in_batch(
            job, plan, login, scripts.text(self.node_script, "backends/batch/node.sh")
        )
        end = _END
        while end in node:
            end += "_"
        command = f"`{self.programs.submit} {self.script_name}`"
        return [
            f"# The job {job.name} on {counted(job.nodes, 'node')}. {command} runs it, with agent.pyz in its folder.",
            scripts.exports(script.identity(job, self.name)),
            scripts.variables(
                run=plan.dir_on(login),
                nodes=job.nodes,
                port=job.port,
                max_restarts=max(0, job.max_restarts - plan.attempt + 1),
                first_attempt=plan.attempt,
                requeue_after=" ".join(queued.REQUEUED_AFTER),
            )
            + self.job_variables(job),
            f"node=$(cat <<'{end}'\n{node}{end}\n)",
        ]

    def problems(self, job: Job, has: Mapping[str, Sequence[str]], where: str) -> list[login_check.Problem]:
        """Return the problems that prevent a submission, from the output of check.sh by key."""
        return login_check.problems(job, has, where, self.title, self.programs.ping)

    def check(self, job: Job, plan: Plan) -> None:
        """Run the preflight check on the login node. Raises UsageError for what is missing, or NameTakenError."""
        assert job.queue is not None
        login = job.queue.login
        is_first = plan.attempt == 1
        command = login_check.command(
            job,
            self.name,
            self.title,
            self.needed,
            run_dir=login.run_dir or job.run_root,
            new=plan.dir_on(login) if login.login and is_first else "",
            name=plan.job_id if is_first else "",
            needs=plan.steps[0].needs,
        )
        done = reach(login).run(command, timeout_s=60)
        if done.code:
            raise UnreachableError(f"{login.name}: {done.last_line}")
        errors = [UsageError(*problem) for problem in self.problems(job, done.by_word, login.name)]
        preflight.refuse([*errors, *preflight.conflicts(plan, login, done.out.splitlines())])

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Submit the script. Raises LaunchError with the message of the program that submits it."""
        self.send_script(plan, secrets, plan.steps[0].argv)

    def send_script(self, plan: Plan, secrets: Mapping[str, str], argv: Sequence[str]) -> None:
        """Write a job's files to the cluster, and run the command that submits it. Raises LaunchError."""
        login, (step,) = plan.nodes[0].machine, plan.steps
        lines, text = script.payload(plan, step, secrets)
        (path,) = step.files
        places = {"dir": script.attempt_dir(plan, login), "folder": plan.dir_on(login), "path": path}
        self.run_submission(login, text, self._command("submit", *argv, secrets=lines, **places))

    def run_submission(self, login: Machine, text: str, command: Sequence[str]) -> None:
        """Run a script that submits `text`. Raises LaunchError with the message of the program that submits it."""
        # In a thread: Ctrl-C waits for the submission, which would escape the cancellation after it.
        done = parallel.all_of([login], lambda node: reach(node).run(command, stdin=text))[login.name]
        if not done.code:
            return
        program = self.programs.submit
        lines = [
            re.sub(f"^{program}: (error: |fatal: )?", "", line)
            for line in done.err.splitlines()
            if "--help" not in line
        ]
        where = "the login node" if login.is_listed else login.name
        why = f"{where}: {program}: {'; '.join(lines) or done.last_line}"
        hint = "to see the batch script, run the same command with plan instead of launch"
        if "unrecognized option" in why:
            section = f"the section {self.name} of cluster.yaml"
            hint = f"correct it in --set or in {section}; `man {program}` lists all options"
        raise LaunchError(why, hint)

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """Return statuses from the nodes' exit-code files, or else from the queue. Copy logs from a remote cluster."""
        return self._monitor.statuses(plan)

    def observe_all(self, plans: Sequence[Plan]) -> list[Sequence[NodeStatus] | ClusterError]:
        """Run one command on each login node, which asks the queue once."""
        return [*self._monitor.statuses_of(plans)]

    def cancel(self, plan: Plan, *, grace_s: float, only_attempt: bool = False) -> None:
        """Cancel the job, and wait until it ends. Raises ClusterError if it is still in the queue."""
        login = plan.nodes[0].machine
        program = self.programs.cancel
        # The batch script needs some seconds to forward the signal.
        grace = max(3, math.ceil(grace_s)) if grace_s else 0
        command = self._cancellation(plan.job_id, plan.job.launch_id, plan.dir_on(login), grace)
        with waiting(f"{self.title} to end {plan.job_id}", grace_s + 120):
            done = reach(login).run(command, timeout_s=grace_s + 120)
        if done.code:
            raise UnreachableError(f"{program}: {done.last_line}", f"clusterctl stop {plan.job_id}")
        if done.out.strip():
            left = ", ".join(done.out.splitlines())
            raise ClusterError(
                f"{left} of {plan.job_id} is still in the queue after {program}", self.programs.own_jobs
            )

    def jobs_on(
        self, inventory: Inventory, supervised: Collection[str]
    ) -> dict[str, list[FoundJob] | ClusterError]:
        """Return what its jobs have on the login node. They run while the queue has them, as it may restart them."""
        (login,) = inventory.machines

        def find(machine: Machine) -> list[FoundJob]:
            jobs = found_on(machine, self.name, self.engines)
            names = {job.launch_id: job.job for job in jobs}
            words = [word for pair in names.items() for word in pair]
            done = reach(machine).run(self._command("queued", *words), timeout_s=60)
            if done.code:
                raise UnreachableError(
                    f"{machine.name}: {self.programs.queue}: {done.last_line}", self.programs.ping
                )
            running = {*done.out.split(), *supervised}
            return [replace(job, runs=job.launch_id in running) for job in jobs]

        return parallel.each([login], find)

    def remove(self, inventory: Inventory, found: FoundJob) -> None:
        """Cancel the job, and remove what it has on the login node. Raises ClusterError."""
        (login,) = inventory.machines
        done = reach(login).run(self._cancellation(found.job, found.launch_id), timeout_s=120)
        if done.code or done.out.strip():
            raise ClusterError(
                f"{login.name}: {found.job} is still in the queue: {done.out.strip() or done.last_line}"
            )
        super().remove(inventory, found)

    def _cancellation(self, job: str, launch_id: str, folder: str = "", grace_s: int = 0) -> list[str]:
        """Return the command that runs cancel.sh; `folder` is the job's, if it is known."""
        words = {"scheduler": self.title, "lister": self.programs.queue}
        return self._command("cancel", job=job, launch=launch_id, folder=folder, grace=grace_s, **words)

    def _command(self, name: str, /, *words: str, **values: scripts.Value) -> list[str]:
        """Return the command that runs a script of this folder after the functions of the batch system."""
        return scripts.command_after(f"backends/{self.name}", f"backends/batch/{name}", *words, **values)

    def requeued(self, plan: Plan) -> Plan | None:
        """Return the next attempt if the job has been requeued, else None. Raises ClusterError if it was cancelled."""
        with waiting(f"{self.title} to requeue {plan.job_id}", _REQUEUE_S):
            return self._requeued(plan)

    def _requeued(self, plan: Plan) -> Plan | None:
        login = plan.nodes[0].machine
        clock = AwakeClock()
        until = clock() + _REQUEUE_S
        while clock() < until:
            try:
                answer = self.ask(plan)
                if answer.job is not None:
                    self.hurry(login, answer.job)
            except UnreachableError:  # an error now would cancel the requeued job
                if clock() + 1 > until:
                    raise
                time.sleep(1)
                continue
            job = answer.job
            if answer.attempt > plan.attempt or (job is not None and job.phase == "pending"):
                return replace(plan, attempt=max(answer.attempt, plan.attempt + 1))
            if job is not None and job.is_cancelled:
                raise ClusterError(job.detail)
            if job is None or not job.is_active:
                return None
            time.sleep(1)
        return None

    def newest(self, plan: Plan) -> Plan | None:
        """Return the plan of the attempt that runs, is in the queue or ran last. None: that is not known yet."""
        answer = self.ask(plan)
        if queued.is_requeued(plan, answer.job, answer.attempt):
            return replace(plan, attempt=max(answer.attempt, plan.attempt + 1))
        return None if answer.job is not None and answer.job.is_active else plan

    def ask(self, plan: Plan) -> Answer:
        """Return what the queue and the nodes say of a job. Raises UnreachableError."""
        return self._answer(poll_script.poll(plan, plan.nodes[0].machine, self._script))

    def _poll(self, plan: Plan, login: Machine) -> NodeStatuses:
        return self._statuses(plan, self._answer(poll_script.poll(plan, login, self._script)))

    def _poll_all(self, plans: Sequence[Plan], login: Machine) -> list[NodeStatuses | ClusterError]:
        made: list[NodeStatuses | ClusterError] = []
        for plan, polled in zip(plans, poll_script.poll_all(plans, login, self._script), strict=True):
            try:
                made.append(self._statuses(plan, self._answer(polled)))
            except Exception as error:  # one job hides no other
                made.append(node_monitor.in_words(error))
        return made

    def _answer(self, polled: poll_script.Answer) -> Answer:
        """Parse what poll.sh prints of a job. Raises UnreachableError if the queue does not answer."""
        (line, running, refused, error), own = polled
        if refused and not line:
            raise UnreachableError(f"{self.title} does not answer: {refused}", self.programs.ping)
        attempt, *hosts = running.split() or ["0"]
        number = int(attempt) if attempt.isdigit() else 0
        return Answer(self.queued_job(line), number, hosts, self.readable(error), own)

    def _statuses(self, plan: Plan, answer: Answer) -> NodeStatuses:
        own = [answer.own[node.name] for node in plan.nodes]
        made = queued.statuses(
            plan,
            answer.job,
            answer.attempt,
            answer.hosts,
            own,
            answer.error,
            scheduler=self.title,
            lister=self.programs.queue,
        )
        return {status.node: status for status in made}


def _words(plan: Plan, login: Machine) -> list[str]:
    """Return the arguments of poll.sh that precede a job's nodes."""
    return [plan.job_id, plan.dir_on(login), str(len(plan.nodes_on(login)))]
