"""State, progress and resource use of jobs in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.supervisor.progress import SCORES

if TYPE_CHECKING:
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
        families: dict[str, GaugeMetricFamily] = {}

        def gauge(name: str, text: str, value: float, **labels: object) -> None:
            family = families.setdefault(
                name, GaugeMetricFamily(f"clusterctl_{name}", text, labels=list(labels))
            )
            family.add_metric([str(label) for label in labels.values()], value)

        def state(job: str, backend: str, state: str) -> None:
            gauge("job_state", "1 for the job's state.", 1, job=job, backend=backend, state=state)

        for name in self._unreadable:
            state(name, "", "unreadable")
        for live_job in self._jobs:
            job = live_job.record.plan.job_id
            plan = live_job.record.plan
            state(job, plan.backend, live_job.status.state)
            if (since := live_job.status.since) is not None:
                gauge(
                    "job_state_since_seconds", "Unix time since which the job has its state.", since, job=job
                )
            if live_job.status.last_state:
                text = "1 for the state in which an unreachable job was seen last."
                gauge("job_last_state", text, 1, job=job, state=live_job.status.last_state)
            gauge("job_attempt", "Number of the attempt, from 1.", plan.attempt, job=job)
            gauge("job_nodes", "Nodes of the job.", len(plan.nodes), job=job)
            if live_job.record.outcome or not live_job.view or live_job.status.last_state:
                continue
            gauge("job_nodes_ready", "Nodes that have joined.", live_job.view.ready_count, job=job)
            for key, (name, text) in _PROGRESS.items():
                if live_job.view.progress and (value := getattr(live_job.view.progress, key)) is not None:
                    gauge(f"job_{name}", text, value, job=job)
            for key in SCORES:
                if live_job.view.metric and (score := live_job.view.metric.score(key)) is not None:
                    gauge("job_score", "Score of the last epoch.", score, job=job, score=key)
            for node in live_job.view.nodes:
                for row in node.ranks:
                    for key, (name, text, factor) in _RANK.items():
                        if (value := getattr(row, key)) is not None:
                            gauge(name, text, factor * value, job=job, node=node.name, rank=row.rank)
        yield from families.values()
