"""State, progress and resource use of jobs in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.supervisor.progress import SCORES

if TYPE_CHECKING:
    from cluster.spec.status import RankUsage
    from cluster.supervisor.job_state import JobView
    from cluster.web.live import LiveJob

#: Fields of progress events, and of a rank's sample: metric, help, factor.
_PROGRESS = {
    "epoch": ("epoch", "Epoch of the last reported step, from 1."),
    "step": ("step", "Last reported step of the epoch."),
    "loss": ("loss", "Training loss at the last reported step."),
    "images_per_s": ("images_per_second", "Training speed."),
}
_RANK = {
    "cpu": ("rank_cpu_cores", "Cores that a rank and its workers use.", 1.0),
    "rss": ("rank_memory_bytes", "Resident memory of a rank and its workers.", 1.0),
    "use": ("rank_gpu_utilization_ratio", "Utilization of the rank's GPU.", 0.01),
    "memory": ("rank_gpu_memory_bytes", "Memory in use on the rank's GPU.", 1.0),
    "temperature": ("rank_gpu_temperature_celsius", "Temperature of the rank's GPU.", 1.0),
}


def render(jobs: Iterable[LiveJob], unreadable: Iterable[str] = ()) -> bytes:
    """Return the metrics of polled jobs; of those with an `unreadable` record, the state."""
    registry = CollectorRegistry()
    registry.register(_Jobs(jobs, unreadable))
    return generate_latest(registry)


class _Jobs(Collector):
    def __init__(self, jobs: Iterable[LiveJob], unreadable: Iterable[str]) -> None:
        self._jobs = jobs
        self._unreadable = unreadable

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing, so that `register` does not collect."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics."""
        families = _Gauges()
        for name in self._unreadable:
            families.add_state(name, "", "unreadable")
        for job in self._jobs:
            families.add_job(job)
        yield from families.values()


class _Gauges(dict[str, GaugeMetricFamily]):
    """The metrics by name, each with a value per job or rank."""

    def add(self, name: str, text: str, value: float, **labels: object) -> None:
        """Add a value of a metric; `text` describes the metric."""
        new = GaugeMetricFamily(f"clusterctl_{name}", text, labels=list(labels))
        self.setdefault(name, new).add_metric([str(label) for label in labels.values()], value)

    def add_state(self, job: str, backend: str, state: str) -> None:
        """Add a job's state."""
        self.add("job_state", "1 for the job's state.", 1, job=job, backend=backend, state=state)

    def add_job(self, polled: LiveJob) -> None:
        """Add what is known of a job and, while it answers, of its progress and ranks."""
        plan = polled.record.plan
        status = polled.status
        job = plan.job_id
        self.add_state(job, plan.backend, status.state)
        if status.since is not None:
            self.add(
                "job_state_since_seconds",
                "Unix time since which the job has its state.",
                status.since,
                job=job,
            )
        if status.last_state:
            text = "1 for the state in which an unreachable job was seen last."
            self.add("job_last_state", text, 1, job=job, state=status.last_state)
        self.add("job_attempt", "Number of the attempt, from 1.", plan.attempt, job=job)
        self.add("job_nodes", "Nodes of the job.", len(plan.nodes), job=job)
        is_answering = not polled.record.outcome and not status.last_state
        if polled.view and is_answering:
            self._add_view(job, polled.view)

    def _add_view(self, job: str, view: JobView) -> None:
        self.add("job_nodes_ready", "Nodes that have joined.", view.ready_count, job=job)
        for key, (name, text) in _PROGRESS.items():
            if view.progress and (value := getattr(view.progress, key)) is not None:
                self.add(f"job_{name}", text, value, job=job)
        for key in SCORES:
            if view.metric and (score := view.metric.score(key)) is not None:
                self.add("job_score", "Score of the last epoch.", score, job=job, score=key)
        for node in view.nodes:
            for usage in node.ranks:
                self._add_rank(job, node.name, usage)

    def _add_rank(self, job: str, node: str, usage: RankUsage) -> None:
        for key, (name, text, factor) in _RANK.items():
            if (value := getattr(usage, key)) is not None:
                self.add(name, text, factor * value, job=job, node=node, rank=usage.rank)
