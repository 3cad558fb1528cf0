"""submitit executor: `AutoExecutor(folder, cluster="clusterctl")` launches functions and commands in containers.

A `CommandFunction` runs unchanged. Any other function is pickled into `folder`, which must have the same path on all
nodes. The container image must contain this package.
"""

import dataclasses
import os
import shlex
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import submitit
from submitit.core import core, utils
from submitit.core.job_environment import JobEnvironment

from cluster import api, contract
from cluster.backends import BACKENDS
from cluster.errors import ClusterError
from cluster.spec.request import DEFAULT_RESTARTS, Request
from cluster.store import JobStore
from cluster.supervisor import job_end, job_monitor, launcher

#: Job states, and Slurm's names for them.
_STATES = dict.fromkeys(("queued", "starting", "joining"), "PENDING")
_STATES |= {"running": "RUNNING", "done": "COMPLETED", "failed": "FAILED", "stopped": "CANCELLED"}


class StoreWatcher(core.InfoWatcher):
    """Reads job states from the job store and the nodes."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return PENDING, RUNNING, COMPLETED, FAILED or CANCELLED; UNKNOWN if the job or its nodes cannot be read."""
        records = JobStore()
        try:
            return _STATES.get(job_monitor.poll(records.load(job_id), records).state, "UNKNOWN")
        except ClusterError:
            return "UNKNOWN"

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        """Return the state, for `Job.get_info`."""
        return {"State": self.get_state(job_id, mode)}

    def update(self) -> None:
        """Do nothing: states are not cached."""


class ClusterctlJob(core.Job[Any]):
    """A launched job; `job_id` is its name."""

    watcher = StoreWatcher()
    launched: api.Launched | None = None
    is_command = False

    def results(self) -> list[Any]:
        """Return the result of each rank's function, or [None] for a command. Raise FailedJobError if it failed."""
        ended = self.launched.wait() if self.launched else None
        if not self.is_command:
            return super().results()
        if ended is not None and ended.exit_code:
            raise utils.FailedJobError(f"{self.job_id}: {ended.why}")
        return [None]

    def exception(self) -> utils.UncompletedJobError | utils.FailedJobError | None:
        """Return the error of the job, or None."""
        if not self.is_command:
            return super().exception()
        try:
            self.results()
        except utils.FailedJobError as error:
            return error
        return None

    def cancel(self, check: bool = True) -> None:
        """Stop the job on every node."""
        try:
            job_end.stop(self.job_id, JobStore())
        except ClusterError:
            if check:
                raise


class ClusterctlExecutor(core.Executor):
    """Launches jobs with the fields of `Request`: `update_parameters(nodes=2, clusterctl_image="x.sif")`."""

    job_class = ClusterctlJob

    @classmethod
    def affinity(cls) -> int:
        """Return 0: only selected by name."""
        return 0

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return {
            "name": "name",
            "timeout_min": "timeout_min",
            "mem_gb": "mem_gb",
            "nodes": "nodes",
            "cpus_per_task": "cpus_per_task",
            "gpus_per_node": "gpus",
            "tasks_per_node": "gpus",
        }

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        names = {field.name for field in dataclasses.fields(Request)}
        return names - {"command", "arguments"} | {"inventory", "timeout_min", "mem_gb", "cpus_per_task"}

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        return [self._launch(submission) for submission in delayed_submissions]

    def _launch(self, delayed: utils.DelayedSubmission) -> ClusterctlJob:
        options = dict(self.parameters)
        function = delayed.function
        settings = [*options.pop("settings", ())]
        for key, form in {
            "timeout_min": "time={}",
            "mem_gb": "mem={}G",
            "cpus_per_task": "cpus-per-task={}",
        }.items():
            if (value := options.pop(key, None)) is not None:
                settings.append(form.format(value))
        name = f"{options.pop('name', 'submitit')}-{uuid.uuid4().hex[:8]}"
        mounts = [*options.pop("mounts", ())]
        backend = options.pop("backend", "auto")
        machines = options.pop("inventory", None)
        machines = api.machines(machines, backend)
        if isinstance(function, submitit.helpers.CommandFunction):
            command = shlex.join(["--no-python", *map(str, (*function.command, *delayed.args))])
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            delayed.set_timeout(int(self.parameters.get("timeout_min") or 5), DEFAULT_RESTARTS)
            delayed.dump(utils.JobPaths(self.folder, job_id=name).submitted_pickle)
            if BACKENDS[launcher.choose_backend(backend, machines)[0]].in_containers is not False:
                mounts.append(f"{self.folder}:{self.folder}:rw")
            command = shlex.join(["-m", "submitit.core._submit", str(self.folder)])
            options["env"] = (*options.get("env", ()), "SUBMITIT_EXECUTOR=clusterctl")
        launched = api.launch(
            name=name,
            command=command,
            backend=backend,
            inventory=machines,
            mounts=mounts,
            settings=settings,
            **options,
        )
        is_command = isinstance(function, submitit.helpers.CommandFunction)
        tasks = 1 if is_command else launched.world_size
        job = self.job_class(self.folder, job_id=name, tasks=list(range(tasks)))
        job.launched = launched
        job.is_command = is_command
        return job


class ClusterctlJobEnvironment(JobEnvironment):
    """The environment variables of a rank, for pickled functions."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": contract.JOB_ID,
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    def activated(self) -> bool:
        """Return whether this process is a rank of such a job."""
        return os.environ.get("SUBMITIT_EXECUTOR") == "clusterctl" and contract.JOB_ID in os.environ

    def _requeue(self, countdown: int) -> None:
        """Do nothing: the launcher restarts the job."""
