"""Python API: `from cluster import launch`, with the options of the command line."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.backends import BACKENDS
from cluster.errors import UsageError
from cluster.spec.model import Inventory, JobRecord
from cluster.store import JobStore


@dataclass(frozen=True)
class JobResult:
    """The end of a job: `outcome` is done, failed or stopped; `exit_code` is as for `clusterctl launch`.

    `metric` has the fields of the event `done`, or else of the newest event `metric` (docs/reference/contract.md).
    """

    outcome: str
    exit_code: int
    why: str
    metric: Mapping[str, object] | None


class Launched:
    """A started job. It outlives this object: `clusterctl attach NAME` follows it."""

    def __init__(self, record: JobRecord, secrets: Mapping[str, str]) -> None:
        self._record = record
        self._secrets = secrets

    @property
    def name(self) -> str:
        """The job's name."""
        return self._record.plan.job_id

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        return self._record.job.world_size

    @property
    def run_dir(self) -> str:
        """The folder of its results and logs."""
        return self._record.plan.run_dir

    def wait(self) -> JobResult:
        """Follow the job to its end, restart it after failures, and collect its results."""
        from cluster.supervisor import display, job_end, report, supervisor

        records = JobStore()
        attempt, refusal = supervisor.Supervisor(
            self._record, records, display.Display(), self._secrets
        ).run()
        outcome, problems = job_end.finish(attempt, records)
        _note(*problems)
        view = attempt.view
        scored = view.done or view.metric
        record = records.load(self.name)
        why = "; ".join(
            text for text in (report.cause(view, attempt.verdict) or record.detail, refusal) if text
        )
        return JobResult(outcome, record.exit_code, why, scored.as_json() if scored else None)

    def state(self) -> str:
        """Return queued, starting, joining, running, unreachable, done, failed or stopped."""
        from cluster.supervisor import job_monitor

        records = JobStore()
        (polled,) = job_monitor.poll_all([records.load(self.name)], records)
        return polled.state

    def stop(self, grace_s: float | None = None) -> None:
        """Stop the job on every node; kill what still runs after `grace_s`, by default the job's. Safe to repeat."""
        from cluster.supervisor import job_end

        job_end.stop(self.name, JobStore(), grace_s)


def launch(
    arguments: Sequence[str] = (),
    *,
    nodes: int | str = "",
    gpus: int | str | Sequence[int] = 1,
    backend: str = "auto",
    inventory: str | Inventory | None = None,
    secrets: Mapping[str, str] | None = None,
    **options: object,
) -> Launched:
    """Start a job on all of its nodes, or on none. Notes for the user go to the logger `cluster.api`.

    Args:
        arguments: The trainer's arguments: `["train", "--data", "coco.yaml"]`.
        nodes: The number of nodes, or a range such as "2:4". By default one, or the whole inventory.
        gpus: Processes per node; a sequence has one number per node, and "all" uses every GPU of each machine.
        backend: As `--backend` of `clusterctl launch`.
        inventory: The path of a cluster.yaml, or an Inventory. By default ./cluster.yaml, or else this machine.
        secrets: Environment variables of the job that are not stored.
        options: Fields of `cluster.spec.request.Request`: name, device, image, command, env, spares, ...

    Raises:
        ClusterError: The request is wrong, or a node could not be started.
    """
    from cluster.spec.request import Request
    from cluster.supervisor import launcher

    each = str(gpus) if isinstance(gpus, int | str) else ",".join(map(str, gpus))
    request = Request(arguments=list(arguments), nodes=str(nodes), gpus=each, backend=backend, **options)  # type: ignore[arg-type]
    if request.build:
        raise UsageError("build: only clusterctl builds images", "docker build, then image=NAME")
    request = replace(request, env=[*request.env, *(secrets or {})])
    target = launcher.choose_target(request, machines(inventory, backend))
    job, notes = target.job(request)
    values = dict(secrets or {})
    notes += [*launcher.visible_secrets(values), *launcher.unusable_spares(job, target.backend)]
    starter = launcher.Launcher(JobStore(), values, sends_secrets=request.send_secrets)
    record, more = starter.launch(job, target.backend, numbered=not request.name)
    _note(*notes, *more)
    return Launched(record, values)


def _note(*texts: str) -> None:
    """Log what the command line prints as notes. Without a configuration, Python prints warnings on stderr."""
    for text in texts:
        logging.getLogger(__name__).warning(text)


def machines(inventory: str | Inventory | None, backend: str) -> Inventory | None:
    """Return the machines of the `inventory` of `launch`, or None for this machine."""
    from cluster.transport import discovery

    if isinstance(inventory, Inventory):
        return inventory
    loaded = discovery.load(BACKENDS, inventory or "", backend=backend)
    return discovery.complete(loaded) if loaded else None
