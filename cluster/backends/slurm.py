"""Jobs as one batch script for Slurm, submitted on a login node: this machine, or one behind SSH.

The script that is submitted is the one that `plan` prints: it needs no Python and nothing of ours on the cluster, finds
its nodes and its port itself, and asks Slurm to run it again after a checkpoint. Everything here but the submission
and the cancelling only looks. A job of Slurm is found by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster import logs, looks, quoting, readiness, resources, sbatch, script, slurm
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.looks import Looks, Seen
from cluster.model import Job, Mount, Node, NodeStatus, Plan, Step, plan_of
from cluster.runtimes import RUNTIMES
from cluster.shells import Shell

#: So old may squeue's answer be: the controller is asked once in that time for all jobs of a user.
INTERVAL_S = 3
#: How long Slurm may take to put a job back into its queue.
_REQUEUE_S = 120.0


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
        """Hand the script to sbatch; raises LaunchError with what it says."""
        (step,) = plan.steps
        ((path, text),) = step.files.items()
        login = plan.nodes[0]
        head = quoting.exports({name: (secrets or {})[name] for name in plan.secrets})
        head += "\n" if head else ""
        agent = resources.text("agent/agent.py")
        words = [path.rpartition("/")[0], plan.dir_on(login), str(head.count("\n")), str(agent.count("\n"))]
        submit = ["bash", "-c", resources.text("agent/slurm_submit.sh"), "submit", *words, *step.argv]
        done = self._reach(login).run(submit, stdin=head + agent + text)
        if done.code:
            why = done.err.strip().splitlines()[-1:] or [done.last_line]
            raise LaunchError(
                f"{readiness.place(replace(login, name='the login node'))}: {why[0].removeprefix('sbatch: error: ')}",
                "see what it was given: the same command with plan instead of launch",
            )

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
        head, seen = looks.ask(self._reach(login), plan, login, poll, words, head=4)
        line, running, refused, error = head
        if refused and not line:
            raise UnreachableError(f"Slurm does not answer: {refused}", "scontrol ping")
        attempt, *hosts = running.split() or ["0"]
        return (slurm.row(line), int(attempt), hosts, error.removeprefix("error: ")), seen

    def _look(self, plan: Plan, login: Node) -> Seen:
        (found, attempt, hosts, error), answers = self._ask(plan, login)
        said = [looks.status(node.name, answers[node.name]) for node in plan.nodes]
        return {status.node: status for status in slurm.statuses(plan, found, attempt, hosts, said, error)}


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
    text = sbatch.render(job, node, run_dir=run_dir, attempt=plan.attempt)
    return Step(login.name, {path: text}, tuple(sbatch.argv(f"{run_dir}/slurm.log", path)), needs, agent)
