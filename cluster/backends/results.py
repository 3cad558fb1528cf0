"""The results of a job: its files on the nodes, copied to its run directory on this machine."""

import contextlib
import functools
from collections.abc import Callable

from cluster import contract
from cluster.errors import ClusterError, UnreachableError
from cluster.spec.model import WORKDIR, Machine, Plan
from cluster.transport import files, parallel, workdir
from cluster.transport.process import interruptible
from cluster.transport.waits import waiting

#: The files of a node's folder that hold its state, and are no results; and those that only this machine writes.
NOT_RESULTS = (
    *(
        "*.pid",
        "*.err",
        "*.exit",
        "*.alive",
        "*.agent",
        "*.venv",
        "*.secrets",
        "*.tmp",
        "common.*",
        "attempt",
        "submitted",
    ),
    f"/attempt-*/{contract.GRACE_FILE}",
    *("/job.yaml", "/report.html", "/supervisor.log", "/inputs.json", "/inputs.tar", "/attempt-*/collected"),
)


def collect(plan: Plan) -> list[str]:
    """Copy the job's results from the nodes to its local folder; return a sentence for each failure.

    The results come from the first node that answers. Of the others only the ranks' logs are copied.
    """
    with waiting(f"the results of {plan.job_id} to be copied"):
        return _collect(plan)


def _collect(plan: Plan) -> list[str]:
    remote = [machine for machine in plan.machines if plan.is_elsewhere(machine)]

    def copy_logs(machine: Machine) -> None:
        ranks = f"attempt-{plan.attempt}/ranks/{plan.nodes_on(machine)[0].name}"
        with contextlib.suppress(files.NoFolderError):  # no rank has started there
            source = f"{plan.dir_on(machine)}/{ranks}"
            target = f"{plan.run_dir}/{ranks}"
            files.collect(machine, source, target, run_dir=plan.run_dir)

    copied = interruptible(lambda: parallel.each(remote, copy_logs))  # Ctrl-C ends all of these transfers
    errors = {name: error for name, error in copied.items() if error is not None}
    failures = [f"not copied: {error.message}" for error in errors.values()]
    answering = [node for node in remote if not isinstance(errors.get(node.name), UnreachableError)]
    if answering and plan.is_elsewhere(plan.nodes[0].machine):
        source = answering[0]
        copies: list[Callable[[], object]] = [
            functools.partial(
                files.collect, source, plan.dir_on(source), plan.run_dir, (*NOT_RESULTS, f"/{WORKDIR}")
            )
        ]
        if plan.workdir:
            copies.append(functools.partial(workdir.fetch, plan, source))
        for copy in copies:  # also if the one before was not complete
            try:
                copy()
            except ClusterError as error:
                failures.append(f"not copied: {error.message}")
                if isinstance(error, UnreachableError):
                    return failures
        if source != plan.nodes[0].machine:
            failures.append(f"the results here come from {source.name}")
    return failures
